"""Errors as RFC 9457 wants them: `application/problem+json`, for every one that a caller can meet."""

from __future__ import annotations

import http
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from distensor.core.errors import (
    AuthenticationError,
    ConfigError,
    ControlError,
    DistensorError,
    HubProtocolError,
    JobHeldError,
    LedgerError,
    NotAllowedError,
    PlacementError,
    StaleEpochError,
    StoreError,
    ThrottledError,
)

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 60
DEFECT = "a defect of the hub"
_STATUSES: Sequence[tuple[type[DistensorError], int]] = (
    (NotAllowedError, 403),
    (ThrottledError, 429),
    (AuthenticationError, 401),
    (PlacementError, 409),
    (StaleEpochError, 409),
    (JobHeldError, 409),
    (HubProtocolError, 400),
    (ControlError, 404),
    (ConfigError, 409),
    (LedgerError, 409),
    (StoreError, 503),  # for now: the disk is full, the database is away
)
_MOST_ERRORS = 20


class FieldProblem(BaseModel):
    """What is wrong with one part of a request. It never repeats what was sent."""

    model_config = ConfigDict(frozen=True)

    where: str = Field(description="query, path, header or body, and the name in it")
    why: str


class Problem(BaseModel):
    """An error."""

    model_config = ConfigDict(frozen=True)

    type: str = Field(default="about:blank", description="always about:blank: the status says what kind it is")
    title: str
    status: int
    detail: str
    instance: str = Field(description="the id of the request, as in the header X-Request-Id; the hub's log has it too")
    errors: list[FieldProblem] | None = Field(default=None, description="with status 422: each thing that is wrong")


class Refusal(Exception):  # noqa: N818  # a refusal is an answer, no error of ours
    """An answer of another status, from within a route."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def status_of(error: DistensorError) -> int:
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def body_of(status: int, detail: str, request_id: str, errors: list[FieldProblem] | None = None) -> bytes:
    title = http.HTTPStatus(status).phrase
    problem = Problem(title=title, status=status, detail=detail, instance=request_id, errors=errors)
    return problem.model_dump_json(exclude_none=True).encode()


def response(
    request: Request,
    status: int,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    errors: list[FieldProblem] | None = None,
) -> Response:
    body = body_of(status, detail, request.scope.get("distensor.request_id", ""), errors)
    return Response(body, status, headers=dict(headers or {}) | extra_headers(status), media_type=MEDIA_TYPE)


def extra_headers(status: int) -> dict[str, str]:
    """What HTTP wants beside some statuses."""
    if status == 401:
        return {"WWW-Authenticate": 'Bearer realm="disTensor"'}
    return {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}


def install(app: FastAPI) -> None:
    """Answer every error of an app in this form. A defect goes on to the outermost layer, which writes it down."""
    app.add_exception_handler(DistensorError, _ours)
    app.add_exception_handler(Refusal, _refusal)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _defect)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, DistensorError)
    status = status_of(error)
    if status == 500:
        raise error
    return response(request, status, str(error))


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return response(request, error.status, error.detail)


async def _framework(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this path", 405: "this path does not take this method"}
    if error.status_code == 400:  # the framework could not read the body
        errors = [FieldProblem(where="body", why="it is no JSON in UTF-8")]
        return response(request, 422, "the body cannot be read", errors=errors)
    detail = words.get(error.status_code, str(error.detail))
    return response(request, error.status_code, detail, headers=error.headers)


async def _defect(request: Request, _: Exception) -> Response:
    return response(request, 500, DEFECT)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [_field(one) for one in error.errors()[:_MOST_ERRORS]]
    return response(request, 422, "the request is not as it should be", errors=found)


def _field(error: Mapping[str, Any]) -> FieldProblem:
    where = ".".join(str(part)[:60] for part in error["loc"])
    return FieldProblem(where=where, why=str(error["msg"])[:300])


_ABOUT = {
    400: "The request contradicts itself.",
    401: "No key, or one that is unknown, revoked or expired.",
    403: "The key is good, but not for this.",
    404: "There is no such thing, or it is another account's.",
    409: "It cannot be done in the present state.",
    412: "It has changed since; read it again.",
    413: "The body is too large.",
    421: "This API is not reached by this host name.",
    422: "Something in the request is not as it should be.",
    429: "Too many refused attempts; Retry-After says when to come back.",
    500: "A defect; the hub's log has the request's id.",
    503: "The books cannot be read or written at present.",
}
_ALWAYS = (400, 413, 421, 422, 500)
_WITH_KEY = (401, 403, 429, 503)


def responses(*more: int, key: bool = True) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: the errors that a route can answer with."""
    statuses = sorted({*_ALWAYS, *(_WITH_KEY if key else ()), *more})
    return {status: _described(status) for status in statuses}


def _described(status: int) -> dict[str, Any]:
    return {"model": Problem, "description": _ABOUT[status], "content": {MEDIA_TYPE: {}}}
