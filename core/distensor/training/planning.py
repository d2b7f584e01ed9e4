"""`ds.plan`: capture, cut and count, without asking a worker for anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from distensor.core import ParallelConfig, Unavailable
from distensor.core.control import Mesh
from distensor.core.errors import SessionError
from distensor.core.pipeline_simulation import StageSeconds, simulate
from distensor.core.problems import Problems
from distensor.core.reading import Reading
from distensor.core.schedules import actions_of_rank, rank_of_stage
from distensor.training.admission import check_dtypes, check_memory, check_workers, cut_for
from distensor.training.batches import row_count, row_major, split_rows
from distensor.training.counting import ForwardCost, count
from distensor.training.options import TrainerOptions
from distensor.training.pieces import MeshPieces
from distensor.training.plan_links import over_links
from distensor.training.plan_report import Plan, RankPlan
from distensor.training.sessions import current_session

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.program.losses import LossWeight


def plan(
    model: DistributedModel,
    *,
    parallel: ParallelConfig,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    loss_weight: LossWeight = None,
    schedule: str = "1f1b",
    micro_batches: int | None = None,
    precision: str = "fp32",
    recompute: str = "none",
    sync: str = "allreduce",
    context_attention: str = "all_gather",
    context_shares: Sequence[int] | None = None,
    mesh: Mesh | None = None,
) -> Plan:
    """What training `model` on `parallel` would take: stages, parameters, operations and memory of each rank.

    The keywords are the Trainer's. Nothing is sent, nothing is changed; what stands in the way is in `Plan.problems`.

    Args:
        batch: one batch as `Trainer.step` takes it; sizes are counted for its rows and lengths.
        mesh: what to compare with; by default the open session's, if there is one.

    Raises:
        UserError: the model cannot be captured or cut as declared; with all other problems, if there are several.
    """
    problems = Problems()
    seen = _mesh(mesh)
    problems.check(check_workers, parallel, seen)
    options = problems.check(
        _options,
        model=model,
        parallel=parallel,
        schedule=schedule,
        micro_batches=micro_batches,
        precision=precision,
        recompute=recompute,
        sync=sync,
        context_attention=context_attention,
        context_shares=context_shares,
    )
    pieces = None if options is None else problems.check(cut_for, model, options, batch, loss, loss_weight)
    if options is None or pieces is None:
        problems.report()
    assert options is not None, "no problem was reported"
    assert pieces is not None, "no problem was reported"
    problems.check(check_memory, pieces.bytes_per_rank(), seen)
    problems.check(check_dtypes, pieces.first.programs, seen)
    return _predict(pieces, options, batch, seen, problems)


def _mesh(mesh: Mesh | None) -> Reading[Mesh]:
    if mesh is not None:
        return mesh
    try:
        return current_session().query_mesh()
    except SessionError:
        return Unavailable(reason="no session is open")


def _options(**chosen: Any) -> TrainerOptions:
    """What shapes the prediction is chosen; everything else is as the Trainer has it without keywords."""
    others: dict[str, Any] = {
        "clip_norm": None,
        "norm_type": 2.0,
        "accumulate": 1,
        "lr_schedule": None,
        "seed": 0,
    }
    return TrainerOptions.of(**others, **chosen)


def _predict(pieces: MeshPieces, options: TrainerOptions, batch: Any, mesh: Reading[Mesh], problems: Problems) -> Plan:
    parallel, first = options.parallel, pieces.first
    flat = first.flatten_batch(batch)
    rows = row_count(flat, row_major(first.batch_inputs))
    split = split_rows(rows, replicas=parallel.data_parallel, micro_batches=options.micro_batches)
    most, micro_batches = max(split.sizes), max(split.micro_batches)
    costs = {
        place: [count(program, most, options.recompute) for program in pieces.cuts[place].programs]
        for place in pieces.cuts
    }
    seconds = [max(cost.flops, 1) for cost in costs[0, 0]]
    lists = [
        actions_of_rank(
            options.schedule,
            rank=rank,
            ranks=parallel.pipeline_parallel,
            stages=pieces.stages,
            micro_batches=micro_batches,
        )
        for rank in range(parallel.pipeline_parallel)
    ]
    run = simulate(
        lists,
        seconds=[StageSeconds(forward=flops, input_gradient=flops, weight_gradient=flops) for flops in seconds],
        place=partial(rank_of_stage, options.schedule, ranks=parallel.pipeline_parallel),
    )
    return Plan(
        parallel=parallel,
        schedule=options.schedule,
        micro_batches=micro_batches,
        rows=most,
        ranks=tuple(
            _rank_plan(pieces, rank, costs, run.in_flight)
            for rank in range(parallel.world_size)
            if pieces.place(rank).dp == 0
        ),
        bubble=run.mean_idle,
        layouts=pieces.layouts,
        gathers=pieces.gathers,
        mesh=mesh,
        problems=problems.found,
        over_links=over_links(
            mesh,
            schedule=options.schedule,
            lists=lists,
            flops=[cost.flops for cost in costs[0, 0]],
            micro_batches=micro_batches,
        ),
    )


def _rank_plan(
    pieces: MeshPieces,
    rank: int,
    costs: Mapping[tuple[int, int], Sequence[ForwardCost]],
    in_flight: Sequence[int],
) -> RankPlan:
    place, stages = pieces.place(rank), pieces.stages_of(rank)
    own = [costs[place.tp, place.cp][stage] for stage in stages]
    programs = pieces.programs_of(rank).values()
    return RankPlan(
        rank=rank,
        place=place,
        stages=stages,
        parameters=sum(math.prod(spec.shape) for program in programs for spec in program.parameters),
        fixed_bytes=pieces.bytes_per_rank()[rank],
        forward_flops=sum(cost.flops for cost in own),
        activation_bytes=max(cost.kept_bytes for cost in own),
        in_flight=in_flight[place.pp],
    )
