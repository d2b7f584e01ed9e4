"""Progress of a run: protobuf <-> `distensor.core.progress`, checked like everything that arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distensor.comm.codec import read_name
from distensor.core.errors import HubProtocolError
from distensor.core.ids import Epoch, JobId
from distensor.core.progress import MOST_STEPS, StepProgress
from distensor.proto import control_pb2 as pb

_LARGEST = 2**53
"""The largest whole number that JSON readers have exactly."""


def write_progress(job_id: JobId, epoch: Epoch, steps: Sequence[StepProgress]) -> pb.ReportProgressRequest:
    return pb.ReportProgressRequest(
        job_id=job_id,
        epoch=epoch,
        steps=[
            pb.StepProgressMessage(
                step=one.step,
                loss=one.loss,
                tokens=one.tokens,
                seconds=one.seconds,
                bytes_sent=one.bytes_sent,
                bytes_received=one.bytes_received,
            )
            for one in steps
        ],
    )


def read_progress(message: pb.ReportProgressRequest) -> tuple[JobId, Epoch, tuple[StepProgress, ...]]:
    """Raises: HubProtocolError: too many steps, or a number that is none."""
    if len(message.steps) > MOST_STEPS:
        raise HubProtocolError(f"{len(message.steps)} steps; at most {MOST_STEPS} are allowed")
    job_id = JobId(read_name(message.job_id, "job_id"))
    return job_id, Epoch(_whole(message.epoch, "epoch")), tuple(map(_step, message.steps))


def _step(message: pb.StepProgressMessage) -> StepProgress:
    if not math.isfinite(message.loss) or not 0 <= message.seconds < math.inf:
        raise HubProtocolError(
            f"loss {message.loss}, seconds {message.seconds}: expected finite numbers, seconds from 0"
        )
    return StepProgress(
        step=_whole(message.step, "step"),
        loss=message.loss,
        tokens=_whole(message.tokens, "tokens"),
        seconds=message.seconds,
        bytes_sent=_whole(message.bytes_sent, "bytes_sent"),
        bytes_received=_whole(message.bytes_received, "bytes_received"),
    )


def _whole(value: int, name: str) -> int:
    if value > _LARGEST:
        raise HubProtocolError(f"{name} {value}: expected at most {_LARGEST}")
    return value
