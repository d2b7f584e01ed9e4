"""How runs go: loss and throughput as their trainers tell them, and a stream of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from distensor.cloud.answers import NAME, NOT_MODIFIED, USUAL, After, IfNoneMatch, Limit, Page, Shape, page_of, shown
from distensor.cloud.context import Caller, guard
from distensor.cloud.problems import Refusal, responses
from distensor.cloud.routes.jobs import require_job
from distensor.cloud.shapes import Moment
from distensor.core.control import JobState
from distensor.core.errors import ControlError, StoreError
from distensor.core.ids import JobId
from distensor.core.job_report import JobSummary
from distensor.hub.authorization import Operation
from distensor.hub.runs import RunStep

router = APIRouter(prefix="/v1/runs", tags=["runs"])

Name = Annotated[str, Path(pattern=NAME, description="the job's id")]
Reads = Annotated[Caller, Depends(guard(Operation.READ_RUN))]
Number = Annotated[int, Query(description="only steps told behind this number", ge=0, le=2**53)]
QUIET_SECONDS = 15.0
MOST_STREAMS = 500
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events until the job has ended.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class StepShape(Shape):
    """One committed step, as the trainer told it."""

    number: int = Field(description="counts what was told of this run since the hub was started")
    at: Moment = Field(description="when the hub heard of it")
    epoch: int
    step: int
    loss: float
    tokens: int
    seconds: float
    tokens_per_second: float | None
    bytes_sent: int = Field(description="of the trainer, in this step")
    bytes_received: int


class RunShape(Shape):
    """A job, and its newest step if one was told."""

    job: str
    name: str
    account: str
    state: JobState
    epoch: int
    newest: StepShape | None


def step_shape(told: RunStep) -> StepShape:
    step = told.progress
    return StepShape(
        number=told.number,
        at=datetime.fromtimestamp(told.at, UTC),
        epoch=told.epoch,
        step=step.step,
        loss=step.loss,
        tokens=step.tokens,
        seconds=step.seconds,
        tokens_per_second=step.tokens / step.seconds if step.seconds > 0 else None,
        bytes_sent=step.bytes_sent,
        bytes_received=step.bytes_received,
    )


def _run_shape(job: JobSummary, newest: RunStep | None) -> RunShape:
    return RunShape(
        job=job.job_id,
        name=job.name,
        account=job.owner,
        state=job.state,
        epoch=job.epoch,
        newest=None if newest is None else step_shape(newest),
    )


@router.get("", name="list_runs", response_model=Page[RunShape], responses=responses(409) | NOT_MODIFIED)
async def list_runs(
    caller: Reads, after: After = None, limit: Limit = USUAL, if_none_match: IfNoneMatch = None
) -> Response:
    """The jobs that have not ended, each with its newest step."""
    inside = caller.context.inside
    found = inside.machine.summaries(caller.only, ended=False)
    page, more = page_of(found, lambda job: job.job_id, after, limit)
    items = [_run_shape(job, inside.service.runs.newest(job.job_id)) for job in page]
    return shown(Page[RunShape](items=items, next=more), if_none_match)


@router.get("/{job}", name="show_run", response_model=RunShape, responses=responses(404) | NOT_MODIFIED)
async def show_run(caller: Reads, job: Name, if_none_match: IfNoneMatch = None) -> Response:
    """A job with its newest step."""
    return shown(await _show(caller, job), if_none_match)


async def _show(caller: Caller, job: str) -> RunShape:
    found = await require_job(caller, job)
    newest = caller.context.inside.service.runs.newest(found.job_id)
    return RunShape(
        job=found.job_id,
        name=found.name,
        account=found.owner,
        state=found.state,
        epoch=found.epoch,
        newest=None if newest is None else step_shape(newest),
    )


@router.get("/{job}/steps", name="list_steps", response_model=Page[StepShape], responses=responses(404) | NOT_MODIFIED)
async def list_steps(
    caller: Reads, job: Name, after: Number = 0, limit: Limit = USUAL, if_none_match: IfNoneMatch = None
) -> Response:
    """The steps that the hub still knows of a run (the newest two thousand), the oldest first."""
    found = await require_job(caller, job)
    told = caller.context.inside.service.runs.steps(found.job_id, after)
    page = told[:limit]
    more = str(page[-1].number) if len(told) > limit else None
    return shown(Page[StepShape](items=list(map(step_shape, page)), next=more), if_none_match)


@router.get("/{job}/events", name="watch_run", response_class=StreamingResponse, responses=_EVENTS | responses(404))
async def watch_run(
    caller: Reads,
    job: Name,
    after: Number = 0,
    last_event_id: Annotated[
        str | None, Header(description="sent by a browser that comes back: it counts like `after`", max_length=100)
    ] = None,
) -> Response:
    """Server-sent events: `run` with each new state of the job, `step` with each step. Ends when the job has ended."""
    found = await require_job(caller, job)
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        after = max(after, int(last_event_id[:15]))
    if caller.context.metrics.streams.open >= MOST_STREAMS:
        raise Refusal(503, f"{MOST_STREAMS} streams are open already")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(caller, found.job_id, after), media_type="text/event-stream", headers=headers)


async def _events(caller: Caller, job_id: JobId, after: int) -> AsyncIterator[str]:
    runs = caller.context.inside.service.runs
    shown_out: list[str] = []
    with contextlib.ExitStack() as stack:
        woken = stack.enter_context(runs.watching(job_id))
        stack.enter_context(caller.context.inside.door.staying(caller.who, _teller(shown_out, woken)))
        stack.enter_context(caller.context.metrics.streams.counted())
        told: tuple[object, ...] = ()
        while not (shown_out or caller.context.closing.is_set()):
            woken.clear()
            run = await _still(caller, job_id)
            if run is None:
                return
            for step in runs.steps(job_id, after):
                after = step.number
                yield f"id: {step.number}\nevent: step\ndata: {step_shape(step).model_dump_json()}\n\n"
            if (now := (run.state, run.epoch)) != told:
                told = now
                yield f"event: run\ndata: {run.model_dump_json()}\n\n"
            if run.state.ended:
                return
            yield await _next(woken)


def _teller(shown_out: list[str], woken: asyncio.Event) -> Callable[[str], None]:
    def tell(why: str) -> None:
        shown_out.append(why)
        woken.set()

    return tell


async def _still(caller: Caller, job_id: JobId) -> RunShape | None:
    try:
        return await _show(caller, job_id)
    except (ControlError, StoreError):  # the job is no longer there, or the books do not answer: the caller comes again
        return None


async def _next(woken: asyncio.Event) -> str:
    """Nothing once there is news; a comment where there was none for so long that a proxy might close."""
    try:
        async with asyncio.timeout(QUIET_SECONDS):
            await woken.wait()
    except TimeoutError:
        return ": nothing new\n\n"
    return ""
