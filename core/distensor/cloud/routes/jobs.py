"""Jobs, why their ranks are where they are, and who was where in each epoch."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field
from starlette.responses import Response

from distensor.cloud.answers import (
    NAME,
    NOT_MODIFIED,
    USUAL,
    After,
    Asked,
    IdempotencyKey,
    IfNoneMatch,
    Limit,
    Page,
    page_of,
    sent,
    shown,
)
from distensor.cloud.context import Caller, account_filter, guard
from distensor.cloud.machines import (
    EpochsShape,
    ExplanationShape,
    JobShape,
    TopologyShape,
    explanation_shape,
    job_shape,
    rank_shape,
)
from distensor.cloud.problems import Refusal, responses
from distensor.core.control import JobState
from distensor.core.ids import Epoch, JobId, NodeId
from distensor.core.job_report import JobReport
from distensor.hub import jobs
from distensor.hub.authorization import Operation
from distensor.hub.records import JobRecord

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Name = Annotated[str, Path(pattern=NAME, description="the job's id")]
Lists = Annotated[Caller, Depends(guard(Operation.LIST_JOBS))]
Explains = Annotated[Caller, Depends(guard(Operation.EXPLAIN_JOB))]
Ends = Annotated[Caller, Depends(guard(Operation.END_JOB))]
ReadsTopology = Annotated[Caller, Depends(guard(Operation.READ_TOPOLOGY))]
_LONGEST_REASON = 500


class Cancellation(Asked):
    """Why a job is ended."""

    reason: str = Field(default="cancelled by its account", max_length=_LONGEST_REASON, pattern=r"^[^\x00-\x1f\x7f]*$")


@router.get("", name="list_jobs", response_model=Page[JobShape], responses=responses(409) | NOT_MODIFIED)
async def list_jobs(
    caller: Lists,
    state: Annotated[JobState | None, Query(description="only those in this state")] = None,
    ended: Annotated[bool, Query(description="also those that have ended: the newest thousand of the hub")] = False,
    account: Annotated[str | None, Query(description="only this account's", pattern=NAME)] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Those that wait first, in the order of the queue; then the others, the oldest first."""
    ended = ended or (state is not None and state.ended)
    all_jobs = caller.context.inside.machine.summaries(account_filter(caller, account), ended=ended)
    found = [job for job in all_jobs if state in (None, job.state)]
    page, more = page_of(found, lambda job: job.job_id, after, limit)
    return shown(Page[JobShape](items=list(map(job_shape, page)), next=more), if_none_match)


@router.get("/{job}", name="show_job", response_model=JobShape, responses=responses(404) | NOT_MODIFIED)
async def show_job(caller: Explains, job: Name, if_none_match: IfNoneMatch = None) -> Response:
    """One job, also one that ended long ago."""
    return shown(job_shape((await _report(caller, job)).job), if_none_match)


@router.get(
    "/{job}/explanation", name="explain_job", response_model=ExplanationShape, responses=responses(404) | NOT_MODIFIED
)
async def explain_job(caller: Explains, job: Name, if_none_match: IfNoneMatch = None) -> Response:
    """By which rule each rank got its place, why other nodes have none, and what a job that waits is missing."""
    return shown(explanation_shape(await _report(caller, job)), if_none_match)


@router.post("/{job}/cancel", name="cancel_job", response_model=JobShape, responses=responses(404, 409))
async def cancel_job(
    caller: Ends, job: Name, asked: Cancellation | None = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """End a job. One that was cancelled before is answered as it is; one that ended otherwise is a conflict."""
    before = await require_job(caller, job)
    reason = (asked or Cancellation()).reason

    async def run() -> Response:
        if before.state.ended and before.state is not JobState.CANCELLED:
            raise Refusal(409, f"job {job} has ended already: it is {before.state.value}")
        await caller.context.inside.service.end_job(caller.who, before.job_id, JobState.CANCELLED, reason)
        return sent(job_shape((await _report(caller, job)).job))

    if before.state is JobState.CANCELLED:
        return sent(job_shape((await _report(caller, job)).job))
    return await caller.once(idempotency_key, asked, run)


@router.get("/{job}/epochs", name="list_epochs", response_model=EpochsShape, responses=responses(404) | NOT_MODIFIED)
async def list_epochs(caller: ReadsTopology, job: Name, if_none_match: IfNoneMatch = None) -> Response:
    """The memberships that a job had, the first one first."""
    found = await require_job(caller, job)
    epochs = await caller.context.look(lambda books: books.epochs_of(found.job_id))
    return shown(EpochsShape(job=found.job_id, epochs=list(epochs)), if_none_match)


@router.get(
    "/{job}/epochs/{epoch}",
    name="show_topology",
    response_model=TopologyShape,
    responses=responses(404) | NOT_MODIFIED,
)
async def show_topology(
    caller: ReadsTopology,
    job: Name,
    epoch: Annotated[int, Path(ge=1, le=2**53)],
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Who was which rank in one epoch."""
    found = await require_job(caller, job)
    ranks = await caller.context.look(lambda books: books.ranks_of(found.job_id, Epoch(epoch)))
    if not ranks:
        raise Refusal(404, f"job {job} had no ranks in an epoch {epoch}")
    shapes = list(map(rank_shape, ranks))
    shape = TopologyShape(job=found.job_id, epoch=epoch, present=epoch == found.epoch, ranks=shapes)
    return shown(shape, if_none_match)


async def require_job(caller: Caller, name: str) -> JobRecord:
    """From memory, or from the books where it ended long ago.

    Raises:
        ControlError: it is not there, or another account's.
    """
    job_id = JobId(name)
    machine = caller.context.inside.machine
    owner = machine.owner_of(job_id)
    found = None if owner is None else machine.job_of(owner, job_id)
    found = found or await caller.context.look(lambda books: books.find_job(job_id))
    caller.require(name, None if found is None else found.owner, f"the hub knows no job {name}")
    assert found is not None, "required"
    return found


async def _report(caller: Caller, name: str) -> JobReport:
    found = await require_job(caller, name)
    inside = caller.context.inside
    if inside.machine.owner_of(found.job_id) is not None:
        return inside.machine.report(found.job_id, inside.clock.monotonic())
    names: dict[NodeId, str] = {node_id: node_id for node_id in found.node_ids}
    return jobs.report_of(found, jobs.summary_of(found, 0), names)
