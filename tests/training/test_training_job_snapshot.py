"""What workers say of their copies is checked before anything of it is written."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from distensor.core import ParallelConfig
from distensor.core.errors import WorkerFailedError
from distensor.nn import DistributedModel
from distensor.optim import OptimizerSpec
from distensor.optim.sparse_spec import SparseRule, SparseSpec
from distensor.program import capture
from distensor.training.checkpoint_manifest import Group
from distensor.training.job_snapshot import JobSnapshot, copy_seconds, wanted_of, wholes_of
from distensor.training.options import TrainerOptions
from distensor.training.pieces import MeshPieces
from distensor.training.replies import Reply

ADAMW = OptimizerSpec(name="adamw", lr=0.1)
FIELDS = ["exp_avg", "exp_avg_sq", "step"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.arange(2.0))
        self.register_buffer("unused", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.shift).square().mean()  # type: ignore[no-any-return]


MODEL = Model()
NAMES = list(MODEL.state_dict())


def pieces_of(sync: str) -> MeshPieces:
    model = DistributedModel(MODEL)
    options = TrainerOptions.of(
        model=model, parallel=ParallelConfig(data_parallel=2), schedule="1f1b", micro_batches=None, sync=sync,
        clip_norm=None, norm_type=2.0, precision="fp32", recompute="none", accumulate=1,
        context_attention="all_gather", checkpoint=None, backend="tls", lr_schedule=None, seed=0,
    )  # fmt: skip
    return MeshPieces.of(capture(MODEL, torch.ones(4, 3), loss_weight="rows"), model, options)


PIECES = {sync: pieces_of(sync) for sync in ("allreduce", "zero3")}

WHOLE: dict[str, Any] = {
    "elements": {"0/layer.weight": 6, "0/layer.bias": 2, "0/shift": 2},
    "fields": {"0/layer.weight": FIELDS, "0/layer.bias": FIELDS},
    "copy_seconds": 0.5,
}
PARTS: list[dict[str, Any]] = [
    {**WHOLE, "elements": {"0/layer.weight": 4, "0/layer.bias": 0, "0/shift": 2}},
    {**WHOLE, "elements": {"0/layer.weight": 2, "0/layer.bias": 2, "0/shift": 2}, "copy_seconds": 0.75},
]


def replies(*metas: dict[str, Any]) -> list[Reply]:
    return [Reply(rank=rank, who=f"rank {rank} on node 'n'", meta=meta, tensors={}) for rank, meta in enumerate(metas)]


def test_of_equal_replicas_one_copies_and_of_cut_weights_each() -> None:
    keys = ["0/layer.weight", "0/layer.bias", "0/shift"]
    found = wanted_of(PIECES["allreduce"], ADAMW)
    assert {rank: sorted(names) for rank, names in found.items()} == {0: sorted(keys)}
    assert sorted(wanted_of(PIECES["zero3"], ADAMW)) == [0, 1]


def test_replicas_that_keep_their_gradients_copy_what_is_their_own() -> None:
    """The second one keeps no copy of what is the first's too: frozen weights and buffers, and all weights."""
    sparse = replace(ADAMW, sparse=SparseSpec(rule=SparseRule.DISTRO))
    wanted = wanted_of(PIECES["allreduce"], sparse)
    assert sorted(wanted[1]) == ["0/layer.bias", "0/layer.weight"]
    assert set(wanted[1]) < set(wanted[0])
    fields = {key: ["exp_avg_sq", "residual", "step"] for key in wanted[1]}
    told = [{**WHOLE, "fields": fields}, {"elements": {}, "fields": fields, "copy_seconds": 0.5}]
    found = wholes_of(PIECES["allreduce"], sparse, ["layer.weight", "shift"], replies(*told))[Group.OPTIMIZER]
    assert sorted(found) == sorted(
        f"layer.weight/{field}{replica}" for field in ("exp_avg_sq", "residual", "step") for replica in ("", ".1")
    )
    assert found["layer.weight/residual"].ranks == {0}
    assert found["layer.weight/residual.1"].ranks == {1}
    told[1]["fields"] = {"0/layer.weight": ["momentum"]}
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* has 'momentum'"):
        wholes_of(PIECES["allreduce"], sparse, ["layer.weight"], replies(*told))


class Reader:
    """Elements count up; what was asked for is kept."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, tuple[int, ...]]] = []
        self.dropped: list[int] = []

    def read(self, rank: int, number: int, key: str, spec: Any) -> Tensor:
        self.asked.append((rank, key, spec.shape))
        return torch.full(spec.shape, float(rank))

    def drop(self, rank: int, number: int) -> None:
        self.dropped.append(rank)


def test_parts_are_put_together_in_the_order_of_the_ranks() -> None:
    reader = Reader()
    wholes = wholes_of(PIECES["zero3"], ADAMW, NAMES, replies(*PARTS))
    snapshot = JobSnapshot(
        number=1, reader=cast("Any", reader), wholes=wholes, module=MODEL.state_dict(), copy_seconds=0.0
    )
    assert torch.equal(snapshot.fetch(Group.MODEL, "layer.weight"), torch.tensor([[0.0, 0, 0], [0, 1, 1]]))
    assert reader.asked == [(0, "0/layer.weight", (4,)), (1, "0/layer.weight", (2,))]
    assert snapshot.fetch(Group.OPTIMIZER, "layer.bias/exp_avg").tolist() == [1.0, 1.0], "rank 0 has nothing of it"
    assert snapshot.fetch(Group.OPTIMIZER, "layer.bias/step").shape == ()
    assert torch.equal(snapshot.fetch(Group.MODEL, "unused"), torch.ones(4)), "no rank holds it; the module does"
    snapshot.release()
    assert reader.dropped == [0, 1]
    assert list(snapshot.specs[Group.MODEL]) == NAMES


def changed(meta: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(meta)
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("fields",), None, r"answered fields=None"),
        (("fields", "0/layer.weight"), "exp_avg", "expected names by weight"),
        (("fields", "0/layer.weight"), [3], "expected names by weight"),
        (
            ("fields", "0/layer.weight"),
            ["momentum_buffer"],
            "has 'momentum_buffer' of 'layer.weight', which adamw has not",
        ),
        (("elements",), [], r"answered elements=\[\]"),
        (("elements", "0/layer.weight"), -1, "expected a number for '0/layer.weight'"),
        (("elements", "0/layer.weight"), True, "expected a number for '0/layer.weight'"),
        (("elements", "0/layer.weight"), 5, r"and its replicas have \[5\] elements of '0/layer.weight'"),
    ],
)
def test_what_is_no_account_of_a_copy_is_refused(path: tuple[str, ...], value: Any, said: str) -> None:
    with pytest.raises(WorkerFailedError, match=rf"rank 0 on node 'n'.*{said}|{said}"):
        wholes_of(PIECES["allreduce"], ADAMW, NAMES, replies(changed(WHOLE, path, value), {}))


def test_parts_that_do_not_make_a_weight_are_refused() -> None:
    wrong = changed(PARTS[1], ("elements", "0/layer.weight"), 3)
    with pytest.raises(WorkerFailedError, match=r"have \[4, 3\] elements of '0/layer.weight'"):
        wholes_of(PIECES["zero3"], ADAMW, NAMES, replies(PARTS[0], wrong))


def test_the_slowest_copy_counts() -> None:
    assert copy_seconds(replies(*PARTS)) == 0.75
    with pytest.raises(WorkerFailedError, match=r"rank 1 on node 'n' answered copy_seconds=-1\.0"):
        copy_seconds(replies(PARTS[0], {"copy_seconds": -1.0}))
