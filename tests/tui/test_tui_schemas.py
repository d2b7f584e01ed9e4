"""Every `--json` answer has the shape that docs/schemas promises: of a real supervisor, and without one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from test_tui_real_supervisor import Node

from distensor_tui.cli import main
from distensor_tui.table import VERBS

FOLDER = Path(__file__).parents[2] / "docs/schemas"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
REGISTRY: Any = Registry().with_resources(
    [(f"{name}.json", Resource.from_contents(schema)) for name, schema in SCHEMAS.items()]
)
ELSEWHERE = {"aggregator", "bandwidth", "demo", "hub", "relay", "cloud"}
"""Commands that are programs of their own; their tests are beside them."""

pytestmark = pytest.mark.timeout(180)


def check(name: str, value: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name], registry=REGISTRY).validate(value)


def test_every_command_has_its_schema() -> None:
    assert SCHEMAS.keys() - {"error"} == {verb.name for verb in VERBS} - ELSEWHERE
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_schema_refuses_another_version_and_half_an_error(name: str) -> None:
    for wrong in ({"v": 2, "ok": True}, {"v": 1, "ok": False, "error": {"code": "x"}}, {}, []):
        with pytest.raises(jsonschema.ValidationError):
            check(name, wrong)


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Any]]:
    def ask(*words: str, code: int = 0) -> list[Any]:
        assert main([*words, "--json"]) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return ask


ASKING = ["status", "why", "devices", "jobs", "earnings", "logs", "pause", "resume", "drain", "retry"]


@pytest.mark.parametrize("verb", [*ASKING, "record", "limits"])
def test_the_error_without_a_supervisor(verb: str, tmp_path: Path, answer: Callable[..., list[Any]]) -> None:
    more = {"record": [str(tmp_path / "r.jsonl")], "limits": ["get"]}.get(verb, [])
    (value,) = answer(verb, *more, "--socket", str(tmp_path / "s"), code=69)
    check(verb, value)
    check("error", value)


def test_the_commands_that_need_no_supervisor(tmp_path: Path, answer: Callable[..., list[Any]]) -> None:
    check("help", answer("help")[0])
    check("completion", answer("completion", "bash")[0])
    check("error", answer("status", "--nonsense", code=64)[0])


def test_service_and_uninstall_say_a_wrong_command_line_in_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    from distensor_server.service import cli

    for name, run in (("service", cli.main), ("uninstall", cli.uninstall)):
        assert run(["--json", "--nonsense"]) == 64
        told = json.loads(capsys.readouterr().out)
        check(name, told)
        assert told["error"]["code"] == "usage"
        assert run(["--nonsense"]) == 64
        assert f"`distensor help {name}` shows examples" in capsys.readouterr().err


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    started = Node(tmp_path_factory.mktemp("n"))
    yield started
    started.close()


def test_the_answers_of_a_real_supervisor(
    node: Node,
    tmp_path: Path,
    answer: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb in ASKING:
        for value in answer(verb, "--socket", str(node.socket)):
            check(verb, value)
            assert value["ok"] is True
    file = tmp_path / "r.jsonl"
    check("record", answer("record", str(file), "--seconds", "0.5", "--socket", str(node.socket))[0])
    for words in (["get"], ["get", "schedule"], ["set", "temperature_max_c", "80", "--device", "cpu"], ["get"]):
        check("limits", answer("limits", *words, "--socket", str(node.socket))[0])
    told = answer("limits", "set", "strict", "battery,disk", "--socket", str(node.socket))[0]
    check("limits", told)
    assert (told["result"]["value"], told["result"]["before"]) == (["battery", "disk"], [])
    check("limits", answer("limits", "unset", "strict", "--socket", str(node.socket))[0])
    (refused,) = answer("limits", "set", "strict", "nothing", "--socket", str(node.socket), code=69)
    check("limits", refused)
    own = ["--supervisor", "--socket", str(node.socket)]
    lines = answer("logs", *own)
    assert lines
    for line in lines:
        check("logs", line)
        assert line["line"]["source"] == "supervisor"
    from distensor_server.verbs import auth, bugreport, doctor

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    quick = [step for step in doctor.examine.__globals__["STEPS"] if step.name not in ("torch", "devices")]
    examine = doctor.examine
    for module in (doctor, bugreport):
        monkeypatch.setattr(module, "examine", lambda world, monotonic: examine(world, monotonic, quick))
    words = ["--json", "--socket", str(node.socket), "--state", str(tmp_path / "state")]
    output = ["--output", str(tmp_path / "report.tar.gz")]
    commands: list[tuple[str, Callable[[list[str]], int], list[str]]] = [
        ("auth", auth.main, ["status", *words]),
        ("doctor", doctor.main, words),
        ("bugreport", bugreport.main, [*words, *output]),
        ("bugreport", bugreport.main, [*words, *output]),
        ("auth", auth.main, ["login", "dtj_in_argv", *words]),
    ]
    monkeypatch.setattr(sys, "argv", ["distensor"])
    oks = []
    for name, run, arguments in commands:
        run(arguments)
        value = json.loads(capsys.readouterr().out)
        check(name, value)
        oks.append(value["ok"])
    assert oks[0] is True
    assert oks[2:] == [True, False, False]
