"""Lists and reports of jobs: protobuf <-> the values of `distensor.core.job_report`, checked like everything that
arrives."""

from __future__ import annotations

from distensor.comm.codec import LONGEST_TEXT, read_name, read_parallel, read_text, read_word, write_parallel
from distensor.core.control import JobState, WorkerState
from distensor.core.errors import HubProtocolError
from distensor.core.ids import DeviceId, Epoch, JobId, NodeId, Rank
from distensor.core.job_report import (
    MOST_JOBS,
    MOST_PASSED,
    JobCost,
    JobQuery,
    JobReport,
    JobsPage,
    JobSummary,
    PassedNode,
    PlacedRank,
)
from distensor.proto import control_pb2 as pb


def write_query(query: JobQuery) -> pb.ListJobsRequest:
    return pb.ListJobsRequest(ended=query.ended, after=query.after or "", most=query.most)


def read_query(message: pb.ListJobsRequest) -> JobQuery:
    if not 1 <= message.most <= MOST_JOBS:
        raise HubProtocolError(f"most={message.most}: expected 1 to {MOST_JOBS}")
    after = JobId(read_name(message.after, "after")) if message.after else None
    return JobQuery(ended=message.ended, after=after, most=message.most)


def write_page(page: JobsPage) -> pb.ListJobsReply:
    return pb.ListJobsReply(jobs=[_write_summary(job) for job in page.jobs], more=page.more)


def read_page(message: pb.ListJobsReply) -> JobsPage:
    if len(message.jobs) > MOST_JOBS:
        raise HubProtocolError(f"{len(message.jobs)} jobs in one page; at most {MOST_JOBS} are allowed")
    return JobsPage(jobs=tuple(_read_summary(job) for job in message.jobs), more=message.more)


def _write_summary(job: JobSummary) -> pb.JobSummaryMessage:
    return pb.JobSummaryMessage(
        job_id=job.job_id,
        name=job.name,
        owner=job.owner,
        state=job.state.value,
        epoch=job.epoch,
        parallel=write_parallel(job.parallel),
        reason=job.reason[:LONGEST_TEXT],
        priority=job.priority,
        position=job.position,
    )


def _read_summary(message: pb.JobSummaryMessage) -> JobSummary:
    return JobSummary(
        job_id=JobId(read_name(message.job_id, "job_id")),
        name=read_name(message.name, "job name"),
        owner=read_name(message.owner, "account"),
        state=read_word(JobState, message.state, "job state"),
        epoch=Epoch(message.epoch),
        parallel=read_parallel(message.parallel),
        reason=read_text(message.reason, "reason"),
        priority=message.priority,
        position=message.position,
    )


def write_explain(job_id: JobId) -> pb.ExplainJobRequest:
    return pb.ExplainJobRequest(job_id=job_id)


def write_report(report: JobReport) -> pb.ExplainJobReply:
    return pb.ExplainJobReply(
        job=_write_summary(report.job),
        ranks=[_write_rank(one) for one in report.ranks],
        passed=[pb.PassedNodeMessage(node=one.node, why=one.why[:LONGEST_TEXT]) for one in report.passed],
        missing=report.missing[:LONGEST_TEXT],
        cost=None if report.cost is None else _write_cost(report.cost),
    )


def _write_cost(cost: JobCost) -> pb.JobCostMessage:
    return pb.JobCostMessage(
        quoted=cost.quoted,
        escrow=cost.escrow,
        refunded=cost.refunded,
        units=cost.units,
        work=cost.work,
        fees=cost.fees,
        lent=cost.lent,
    )


def _read_cost(message: pb.JobCostMessage, job_id: JobId) -> JobCost:
    for field, value in message.ListFields():
        if value < 0:
            raise HubProtocolError(f"{field.name}={value}: expected 0 or more micro-credits")
    return JobCost(
        job_id=job_id,
        quoted=message.quoted,
        escrow=message.escrow,
        refunded=message.refunded,
        units=message.units,
        spent=message.work + message.fees,
        work=message.work,
        fees=message.fees,
        lent=message.lent,
    )


def read_report(message: pb.ExplainJobReply) -> JobReport:
    if len(message.passed) > MOST_PASSED:
        raise HubProtocolError(f"{len(message.passed)} nodes without a rank; at most {MOST_PASSED} are allowed")
    job = _read_summary(message.job)
    ranks = tuple(_read_rank(one) for one in message.ranks)
    if ranks and [one.rank for one in ranks] != list(range(len(ranks))):
        raise HubProtocolError(f"{len(ranks)} ranks that are not in their order")
    return JobReport(
        job=job,
        ranks=ranks,
        passed=tuple(
            PassedNode(node=read_name(one.node, "node name"), why=read_text(one.why, "why")) for one in message.passed
        ),
        missing=read_text(message.missing, "missing"),
        cost=_read_cost(message.cost, job.job_id) if message.HasField("cost") else None,
    )


def _write_rank(rank: PlacedRank) -> pb.PlacedRankMessage:
    return pb.PlacedRankMessage(
        rank=rank.rank,
        node_id=rank.node_id,
        node=rank.node,
        device_id=rank.device_id,
        why=rank.why[:LONGEST_TEXT],
        state="" if rank.state is None else rank.state.value,
    )


def _read_rank(message: pb.PlacedRankMessage) -> PlacedRank:
    return PlacedRank(
        rank=Rank(message.rank),
        node_id=NodeId(read_name(message.node_id, "node_id")),
        node=read_name(message.node, "node name"),
        device_id=DeviceId(read_name(message.device_id, "device_id")),
        why=read_text(message.why, "why"),
        state=read_word(WorkerState, message.state, "worker state") if message.state else None,
    )
