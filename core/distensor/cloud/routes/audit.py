"""The audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from distensor.cloud.answers import NOT_MODIFIED, USUAL, IfNoneMatch, Limit, Page, shown
from distensor.cloud.context import Caller, guard
from distensor.cloud.problems import responses
from distensor.cloud.shapes import AuditShape, audit_shape
from distensor.hub.authorization import Operation

router = APIRouter(prefix="/v1/audit", tags=["admin"])

Reads = Annotated[Caller, Depends(guard(Operation.READ_AUDIT))]
_LARGEST = 2**53


@router.get("", name="list_audit", response_model=Page[AuditShape], responses=responses(409) | NOT_MODIFIED)
async def list_audit(
    caller: Reads,
    after: Annotated[int | None, Query(description="the `next` of the page before", ge=1, le=_LARGEST)] = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """What was changed and what was refused, newest first."""
    found = await caller.context.look(lambda books: books.audit(limit + 1, after))
    page = found[:limit]
    more = str(page[-1].number) if len(found) > limit else None
    return shown(Page[AuditShape](items=[audit_shape(one) for one in page], next=more), if_none_match)
