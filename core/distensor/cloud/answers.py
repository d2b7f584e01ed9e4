"""Answers with an ETag, pages of lists, and what routes say about both in OpenAPI."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Header, Query, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from distensor.cloud.problems import Refusal

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
MOST = 200
USUAL = 50
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_TAGS = r'^(\*|(W/)?"[!#-~]*"(\s*,\s*(W/)?"[!#-~]*")*)$'

After = Annotated[str | None, Query(description="the `next` of the page before", pattern=NAME)]
Limit = Annotated[int, Query(description="how many items at most", ge=1, le=MOST)]
IfNoneMatch = Annotated[
    str | None, Header(description="the ETag that the caller has: 304 when nothing has changed", max_length=1000)
]
IfMatch = Annotated[
    str | None, Header(description="the ETag that the caller has read: 412 when it has changed since", pattern=_TAGS)
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="the same key with the same request gets the same answer, for a day and while the hub runs",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
    ),
]
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "What the caller has is still so.", "headers": {"ETag": {"schema": {"type": "string"}}}}
}


def _whole(value: object) -> object:
    """For JSON Schema 62.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Goes behind the bounds of a number: before them it would keep them out of the document."""


class Shape(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True)


class Asked(BaseModel):
    """A body that was sent; what is not in it is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Page(Shape, Generic[M]):
    """A part of a list, in a fixed order."""

    model_config = ConfigDict(json_schema_extra={"description": "A part of a list, in a fixed order."})

    items: list[M]
    next: str | None = Field(description="give it as `after` for the page behind this one; null on the last one")


def page_of(
    found: Sequence[T], name: Callable[[T], str], after: str | None, limit: int
) -> tuple[Sequence[T], str | None]:
    """The items behind the one called `after`, and the name of the last one if there are more.

    Raises:
        Refusal: there is none of this name.
    """
    start = 0
    if after is not None:
        start = next((place for place, one in enumerate(found, 1) if name(one) == after), -1)
        if start < 0:
            raise Refusal(409, "query `after`: the list has no such item any more; begin again without it")
    page = found[start : start + limit]
    more = start + limit < len(found)
    return page, name(page[-1]) if more else None


def sent(model: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = model.model_dump_json().encode()
    return Response(body, status, headers={**(headers or {}), "ETag": etag(body)}, media_type="application/json")


def shown(model: BaseModel, if_none_match: str | None) -> Response:
    """The answer to a GET: only its ETag where the caller has it already."""
    answer = sent(model, headers={"Cache-Control": "private, no-cache"})
    tag = answer.headers["ETag"]
    if if_none_match is not None and _matches(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag, "Cache-Control": "private, no-cache"})
    return answer


def etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def require_match(if_match: str | None, model: BaseModel) -> None:
    """Raises: Refusal: the caller has read another state than the present one."""
    if if_match is not None and not _matches(if_match, etag(model.model_dump_json().encode())):
        raise Refusal(412, "it has changed since it was read: read it again")


def _matches(header: str, tag: str) -> bool:
    return header.strip() == "*" or tag in (one.strip().removeprefix("W/") for one in header.split(","))


def location(request: Request, name: str, **path: str) -> str:
    """The path of a thing that was made."""
    return str(request.app.url_path_for(name, **path))
