"""The process-group helpers against recorded results, and against what was recorded as a defect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_pool import GroupPool
from torch import nn

import distensor.core.distributed as helpers
from distensor.core.errors import ConfigError

RECORDED = json.loads((Path(__file__).parent / "data" / "distributed.json").read_text())
CASES = {case["case"]: case["per_rank"] for case in RECORDED["cp_helpers_world4"]["cases"]}
X = torch.arange(48.0).reshape(2, 8, 3)


@contextmanager
def mesh(**sizes: Any) -> Iterator[None]:
    helpers.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        helpers.destroy_model_parallel()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def split_subgroup(_: int) -> Any:
    with mesh(tp_size=2, cp_size=2):
        assert dist.get_process_group_ranks(helpers.get_cp_group()) in ([0, 2], [1, 3])
        return helpers.split_inputs_cp(X, 0, helpers.get_cp_group()).tolist()


def cat_subgroup(rank: int) -> Any:
    with mesh(tp_size=2, cp_size=2):
        return helpers.cat_outputs_cp(torch.tensor([[rank, rank + 10.0]]), 1, helpers.get_cp_group()).tolist()


def cat_with_grad(rank: int) -> Any:
    x = torch.tensor([[rank, rank + 10.0]], requires_grad=True)
    out = helpers.cat_outputs_cp_with_grad(x, 0, world())
    (out * torch.arange(1.0, 9.0).reshape(4, 2)).sum().backward()
    assert x.grad is not None
    return {"out": out.tolist(), "grad": x.grad.tolist()}


def cat_with_grad_noncontiguous(rank: int) -> Any:
    x = torch.arange(6.0).reshape(2, 3).add(rank).t()
    return str(helpers.cat_outputs_cp_with_grad(x, 0, world()).shape)


def round_trip(dtype: torch.dtype) -> bool:
    x = X.to(dtype)
    return torch.equal(helpers.cat_outputs_cp(helpers.split_inputs_cp(x, 1, world()), 1, world()), x)


def broadcast_split(rank: int, empty: torch.Tensor) -> Any:
    mine = torch.arange(8.0).reshape(1, 8) if rank == 0 else empty
    return helpers.broadcast_split_tensor(mine, 1, world()).tolist()


def broadcast_requires_grad(rank: int) -> bool:
    return bool(helpers.broadcast(torch.full((2,), float(rank), requires_grad=True), world()).requires_grad)


def broadcast_states(rank: int) -> Any:
    device_mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        for number, state in enumerate([*model.parameters(), *model.buffers()]):
            state.fill_(10 * rank + number)
    helpers.broadcast_dtensor_model_states(model, device_mesh)
    return [float(state.flatten()[0]) for state in [*model.parameters(), *model.buffers()]]


def broadcast_states_no_replicate(_: int) -> None:
    device_mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    helpers.broadcast_dtensor_model_states(nn.Linear(2, 2), device_mesh)


def get_local(_: int) -> bool:
    plain = torch.zeros(2)
    return helpers.get_local_tensor_if_dtensor(plain) is plain


def dist_init(_: int) -> Any:
    """The group is there already: only the mesh is made."""
    helpers.dist_init(cp_size=2)
    sizes = helpers.get_dp_world_size(), helpers.get_cp_world_size()
    helpers.destroy_model_parallel()
    return sizes


def accessors(_: int) -> Any:
    names = [name for name in CASES[ACCESSORS][0]["out"] if hasattr(helpers, name)]
    with mesh(tp_size=2, cp_size=2):
        groups = {
            "get_tp_group_ranks": helpers.get_tp_group(),
            "get_cp_group_ranks": helpers.get_cp_group(),
            "get_dp_group_ranks": helpers.get_dp_group(),
            "get_pp_group_ranks": helpers.get_pp_group(),
            "get_model_parallel_group_ranks": helpers.get_model_parallel_group(),
            "dp_with_cp_ranks": helpers.get_dp_group(with_context_parallel=True),
            "tp_with_cp_ranks": helpers.get_tp_group(with_context_parallel=True),
        }
        return (
            {name: getattr(helpers, name)() for name in names}
            | {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
            | {
                "dp_rank_with_cp": helpers.get_dp_rank(with_context_parallel=True),
                "tp_rank_with_cp": helpers.get_tp_rank(with_context_parallel=True),
                "tp_src_with_cp": helpers.get_tensor_model_parallel_src_rank(with_context_parallel=True),
                "tp_last_with_cp": helpers.get_tensor_model_parallel_last_rank(with_context_parallel=True),
            }
        )


def after_destroy(_: int) -> bool:
    with mesh(tp_size=2):
        assert helpers.model_parallel_is_initialized()
    return helpers.model_parallel_is_initialized()


ACCESSORS = "accessors tp2 cp2 pp1 dp1 order tp-cp-pp-dp"
RUNS: dict[str, Callable[[int], Any]] = {
    "split world dim1": lambda _: helpers.split_inputs_cp(X, 1, world()).tolist(),
    "split subgroup dim0": split_subgroup,
    "split noncontiguous": lambda _: helpers.split_inputs_cp(
        torch.arange(48.0).reshape(2, 3, 8).transpose(1, 2), 1, world()
    ).tolist(),
    "split very negative dim": lambda _: helpers.split_inputs_cp(X, -4, world()),
    "split zero length": lambda _: list(helpers.split_inputs_cp(torch.zeros(2, 0, 3), 1, world()).shape),
    "cat world dim0": lambda rank: helpers.cat_outputs_cp(torch.tensor([[rank, rank + 10.0]]), 0, world()).tolist(),
    "cat subgroup dim1": cat_subgroup,
    "cat_with_grad replicated loss": cat_with_grad,
    "cat_with_grad noncontiguous": cat_with_grad_noncontiguous,
    "roundtrip int64": lambda _: round_trip(torch.int64),
    "roundtrip bf16": lambda _: round_trip(torch.bfloat16),
    "broadcast tensor same shape": lambda rank: helpers.broadcast(torch.full((2,), float(rank)), world()).tolist(),
    "broadcast different shape same ndim": lambda rank: helpers.broadcast(
        torch.full((rank + 1, 2), float(rank)), world()
    ).tolist(),
    "broadcast str": lambda rank: helpers.broadcast(f"msg-{rank}", world()),
    "broadcast None everywhere": lambda _: helpers.broadcast(None, world()),
    "broadcast_split": lambda rank: broadcast_split(rank, torch.zeros(1, 8)),
    "broadcast_split empty on others": lambda rank: broadcast_split(rank, torch.zeros(0, 0)),
    "broadcast requires_grad": broadcast_requires_grad,
    "object split indivisible": lambda _: helpers.split_inputs_cp_object_list(list(range(6)), world()),
    "broadcast_dtensor_model_states CPU": broadcast_states,
    "broadcast_dtensor_model_states no replicate dim": broadcast_states_no_replicate,
    "get_local plain": get_local,
    "dist_init CPU": dist_init,
    "before init: get_tp_world_size": lambda _: helpers.get_tp_world_size(),
    "before init: get_cp_world_size": lambda _: helpers.get_cp_world_size(),
    "before init: get_dp_world_size": lambda _: helpers.get_dp_world_size(),
    "before init: get_pp_world_size": lambda _: helpers.get_pp_world_size(),
    "before init: get_dp_group": lambda _: helpers.get_dp_group(),
    "before init: get_pipeline_model_parallel_next_rank": lambda _: helpers.get_pipeline_model_parallel_next_rank(),
    "before init: is_last_tp_cp_rank": lambda _: helpers.is_last_tp_cp_rank(),
    "before init get_tp_group(check_initialized=False)": lambda _: helpers.get_tp_group(check_initialized=False),
    "init indivisible": lambda _: helpers.initialize_model_parallel(tp_size=3),
    ACCESSORS: accessors,
    "destroy signature accepts destroy_process_groups?": lambda _: helpers.destroy_model_parallel(
        destroy_process_groups=True
    ),
    "after destroy initialized": after_destroy,
}

# Where ours differs on purpose: what every rank answers, or what it raises.
OURS: dict[str, list[Any] | str] = {
    "split very negative dim": "seq_dim=-4: the tensor has 3 dims; expected -3 to 2",
    "object split indivisible": "6 cannot divide cp_size 4.*such as 4 or 8",
    "broadcast_dtensor_model_states CPU": [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]] * 2,
    "broadcast_dtensor_model_states no replicate dim": r"'replicate' does not exist.*\('dp',\)",
    "dist_init CPU": [(2, 2)] * 4,
    "before init: get_tp_world_size": "^tensor model parallel group is not initialized",
    "before init: get_cp_world_size": "^context parallel group is not initialized",
    "before init: get_dp_world_size": "^data parallel group is not initialized",
    "before init: get_pp_world_size": "^pipeline model parallel group is not initialized",
    "before init: get_dp_group": "^data parallel group is not initialized",
    "before init: get_pipeline_model_parallel_next_rank": "^pipeline model parallel group is not initialized",
    "before init: is_last_tp_cp_rank": "^tensor model parallel with context parallel group is not initialized",
    "before init get_tp_group(check_initialized=False)": [None] * 4,
    "init indivisible": r"world_size \(4\) is not divisible by tp_size \(3\).*expected a product of 1, 2, 4",
    "destroy signature accepts destroy_process_groups?": [None] * 4,
}


def answer(rank: int, case: str) -> Any:
    """What a case gives here, or the words of the error."""
    try:
        return RUNS[case](rank)
    except ConfigError as error:
        return f"ConfigError: {error}"


def test_every_recorded_case_is_here() -> None:
    assert set(RUNS) == set(CASES)
    assert set(OURS) >= {case for case, ranks in CASES.items() if any("raises" in result for result in ranks)}


@pytest.mark.parametrize("case", [case for case in CASES if case not in OURS])
def test_the_same_as_recorded(four: GroupPool, case: str) -> None:
    assert four.run(answer, case) == [result["out"] for result in CASES[case]]


@pytest.mark.parametrize("case", [case for case, ours in OURS.items() if isinstance(ours, list)])
def test_what_failed_elsewhere_works_here(four: GroupPool, case: str) -> None:
    assert four.run(answer, case) == OURS[case]


@pytest.mark.parametrize("case", [case for case, ours in OURS.items() if isinstance(ours, str)])
def test_every_rank_raises_an_error_that_says_what_is_right(four: GroupPool, case: str) -> None:
    pattern = OURS[case]
    assert isinstance(pattern, str)
    for words in four.run(answer, case):
        with pytest.raises(ConfigError, match=pattern):
            raise ConfigError(str(words).removeprefix("ConfigError: "))
        assert str(words).startswith("ConfigError: ")


FIND_SPLIT = RECORDED["find_split"]["cases"]


def arguments_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return torch.Size(case["shape"]), case["cp_size"], tuple(case["patch_values"]), case["view_factor"]


def is_whole(case: dict[str, Any]) -> bool:
    return "split" in case and min(case["split"]) > 0


@pytest.mark.parametrize("case", [case for case in FIND_SPLIT if is_whole(case)], ids=str)
def test_find_split_as_recorded(case: dict[str, Any]) -> None:
    found = helpers.find_split(*arguments_of(case))
    assert isinstance(found, torch.Size)
    assert list(found) == case["split"]
    assert helpers.split_factors(*arguments_of(case))[0] == case["cp_size_t"]


@pytest.mark.parametrize("case", [case for case in FIND_SPLIT if not is_whole(case)], ids=str)
def test_find_split_refuses_what_was_refused_or_empty(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cp_size=|dims|patch"):
        helpers.find_split(*arguments_of(case))
