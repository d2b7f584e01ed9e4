"""The document that describes the API is complete, and the API keeps to it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import SkipTest

import pytest
import requests
import schemathesis
from cloud_kit import CloudHub
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth

from distensor.cloud.app import ROUTERS
from distensor.cloud.problems import MEDIA_TYPE
from distensor.comm.keys import KeyKind

OPEN = {"/v1/health/live", "/v1/health/ready"}
LONG = int(os.environ.get("DISTENSOR_FUZZ_INPUTS", "60"))
ENDLESS = {"/v1/runs/{job}/events"}
UNFIT: list[Any] = [ignored_auth]
"""It wants 401 for ever, where a host that shows wrong keys soon gets 429; the matrix looks at that."""
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@pytest.fixture(scope="module")
def document(hub: CloudHub) -> dict[str, Any]:
    found: dict[str, Any] = hub.stranger().get("/v1/openapi.json").json
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    paths = {route.path for router in ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    assert set(document["paths"]) == paths


def test_every_operation_says_what_it_does_and_how_it_fails(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        where = f"{method} {path}"
        assert operation["description"].endswith("."), where
        answers = operation["responses"]
        needed = {"400", "413", "421", "422", "500"} | (set() if path in OPEN else {"401", "403", "429", "503"})
        assert needed <= set(answers), where
        assert ("404" in answers) >= ("{" in path), where
        assert [status for status in answers if status.startswith("2")], where
        for status, answer in answers.items():
            if status >= "400":
                assert set(answer["content"]) == {MEDIA_TYPE}, (where, status)
                assert answer["content"][MEDIA_TYPE]["schema"], (where, status)
        assert bool(operation.get("security")) == (path not in OPEN), where


def test_every_parameter_and_body_is_described(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description") or parameter["name"] == "epoch", (path, method, parameter["name"])
    for name, shape in document["components"]["schemas"].items():
        assert shape.get("description") or "enum" in shape, name


def explore(hub: CloudHub, *, inputs: int) -> int:
    """Requests that the document allows and such as it forbids, to every operation; how many were sent."""
    keys = itertools.cycle([hub.key("me", kind) for kind in (KeyKind.ADMIN, KeyKind.TRAINER, KeyKind.PROVIDER)])
    schema = schemathesis.openapi.from_url(f"http://{hub.address}/v1/openapi.json")
    sent = itertools.count()
    with requests.Session() as session:
        for found, mode in itertools.product(schema.get_all_operations(), GenerationMode):
            operation = found.ok()
            if operation.path not in ENDLESS:
                _try(operation, mode, inputs, lambda: (next(sent), next(keys))[1], session)
    return next(sent)


def _try(operation: Any, mode: GenerationMode, inputs: int, next_key: Callable[[], str], session: Any) -> None:
    def one(case: Any) -> None:
        bearer = {"Authorization": f"Bearer {next_key()}"}
        case.call_and_validate(headers=bearer, session=session, timeout=20, excluded_checks=UNFIT)

    cases = operation.as_strategy(mode)
    run = settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(case=cases)(one))
    try:
        run()
    except (Unsatisfiable, SkipTest):  # nothing can be wrong with a request that has no parts
        assert mode is GenerationMode.NEGATIVE


def test_the_api_keeps_to_its_document(hub: CloudHub) -> None:
    sent = explore(hub, inputs=2)
    print(f"schemathesis: {sent} requests")
    assert sent > 100
    assert not [line for line in hub.hub.lines if "Traceback" in line]


@pytest.mark.slow
def test_the_api_keeps_to_its_document_for_long(hub: CloudHub) -> None:
    print(f"schemathesis: {explore(hub, inputs=LONG)} requests")
    assert not [line for line in hub.hub.lines if "Traceback" in line]
