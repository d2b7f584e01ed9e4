"""Whether the hub is well, what Prometheus reads, and what this API is."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Security
from starlette.responses import Response

from distensor.cloud.answers import Shape, sent
from distensor.cloud.context import KEY_SCHEME, Caller, context_of, guard, refuse_unknown_query
from distensor.cloud.metrics import CONTENT_TYPE
from distensor.cloud.problems import Refusal, responses
from distensor.core.errors import StoreError
from distensor.hub.authorization import Operation

router = APIRouter(tags=["health"])

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_metrics_caller = guard(Operation.READ_METRICS)


class Health(Shape):
    """All is well."""

    status: str


Knows = Depends(refuse_unknown_query)


@router.get("/v1/health/live", name="live", response_model=Health, responses=responses(key=False), dependencies=[Knows])
async def live() -> Response:
    """The process answers."""
    return sent(Health(status="live"))


@router.get(
    "/v1/health/ready", name="ready", response_model=Health, responses=responses(503, key=False), dependencies=[Knows]
)
async def ready(request: Request) -> Response:
    """The books can be read and written, and the hub is not stopping."""
    context = context_of(request)
    if context.closing.is_set():
        raise Refusal(503, "the hub is stopping")
    try:
        await context.look(lambda books: books.access_version())
        context.inside.writer.require_writable()
    except StoreError as error:  # the reason names files and hosts: it is for the log and for who has a key
        raise Refusal(503, "the books cannot be read or written at present") from error
    return sent(Health(status="ready"))


async def _may_read_metrics(request: Request, _: Annotated[object, Security(KEY_SCHEME)]) -> Caller | None:
    if context_of(request).settings.open_metrics:
        refuse_unknown_query(request)
        return None
    return await _metrics_caller(request)


_may_read_metrics.operation = Operation.READ_METRICS  # type: ignore[attr-defined]  # as `guard` does


@router.get(
    "/metrics",
    name="metrics",
    response_class=Response,
    responses=_TEXT | responses(),
)
async def metrics(request: Request, _: Annotated[Caller | None, Depends(_may_read_metrics)]) -> Response:
    """Figures in the format of Prometheus."""
    return Response(context_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})
