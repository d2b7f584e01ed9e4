"""The promise, measured: models x configurations of the mesh x precisions against the eager module in one process.

`make parity` runs everything on real processes (a hub, two supervisors, up to eight workers) and writes
docs/parity.json and docs/parity.md; it takes about an hour on two cores. `python benchmarks/parity.py --models llama
--meshes tp2,pp2` runs some and only prints. For every cell: one batch of uneven parts, its loss and every gradient;
then 20 steps of AdamW, the loss of each. `--resume` keeps the cells that the files hold already.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "program"))

from program_families import FAMILIES, Family

from distensor.core import ParallelConfig
from distensor.core.errors import UserError
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping
from distensor.program import run_module
from distensor.training import Session, Trainer
from distensor.training.parity import relative_loss_difference
from distensor.training.sessions import session

MODELS = ("llama", "llama_tied", "gpt2", "qwen2", "mixtral", "bert", "vit")
MESHES = (
    "dp2", "tp2", "pp2", "cp2", "dp2+zero3",
    "dp2-tp2", "dp2-pp2", "dp2-cp2", "tp2-pp2", "tp2-cp2", "pp2-cp2",
    "dp2-tp2-pp2", "dp2-tp2-cp2", "dp2-pp2-cp2", "tp2-pp2-cp2",
)  # fmt: skip
SHORT = ("dp2", "tp2", "pp2", "cp2", "tp2-pp2-cp2")
"""What is measured in bf16 too."""
ROWS, SEQUENCE, STEPS = 5, 13, 20
LR, EPS = 1e-3, 1e-6
LIMITS = {"gradient": 1e-6, "gradient with cp": 1e-5, "curve": 1e-5}

_LLAMA = {
    "model.embed_tokens.weight": Shard(dim=0),
    "model.layers.*.self_attn.q_proj.weight": Shard(dim=0),
    "model.layers.*.self_attn.k_proj.weight": Shard(dim=0),
    "model.layers.*.self_attn.v_proj.weight": Shard(dim=0),
    "model.layers.*.self_attn.o_proj.weight": Shard(dim=1),
}
_LLAMA_MLP = {
    "model.layers.*.mlp.gate_proj.weight": Shard(dim=0),
    "model.layers.*.mlp.up_proj.weight": Shard(dim=0),
    "model.layers.*.mlp.down_proj.weight": Shard(dim=1),
}
_HEAD = {"lm_head.weight": Shard(dim=0)}
SPECS: Mapping[str, Mapping[str, Shard]] = {
    "llama": {**_LLAMA, **_LLAMA_MLP, **_HEAD},
    "llama_tied": {**_LLAMA, **_LLAMA_MLP},
    "qwen2": {
        **_LLAMA,
        **_LLAMA_MLP,
        **_HEAD,
        "model.layers.*.self_attn.q_proj.bias": Shard(dim=0),
    },
    "mixtral": {
        **_LLAMA,
        **_HEAD,
        "model.layers.*.mlp.experts.gate_up_proj": Shard(dim=1),
        "model.layers.*.mlp.experts.down_proj": Shard(dim=2),
    },
    "gpt2": {
        "transformer.wte.weight": Shard(dim=0),
        "transformer.h.*.attn.c_attn.weight": Shard(dim=1),
        "transformer.h.*.attn.c_proj.weight": Shard(dim=0),
        "transformer.h.*.mlp.c_fc.weight": Shard(dim=1),
        "transformer.h.*.mlp.c_proj.weight": Shard(dim=0),
    },
    "bert": {
        "bert.encoder.layer.*.attention.self.*.weight": Shard(dim=0),
        "bert.encoder.layer.*.attention.output.dense.weight": Shard(dim=1),
        "bert.encoder.layer.*.intermediate.dense.weight": Shard(dim=0),
        "bert.encoder.layer.*.output.dense.weight": Shard(dim=1),
    },
    "vit": {
        "vit.layers.*.attention.*_proj.weight": Shard(dim=0),
        "vit.layers.*.mlp.fc1.weight": Shard(dim=0),
        "vit.layers.*.mlp.fc2.weight": Shard(dim=1),
    },
}
"""Column and row pairs, as a user would write them."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one mesh in one precision; differences are relative, norm over norm."""

    model: str
    mesh: str
    precision: str
    loss: float | None = None
    gradient: float | None = None
    worst: float | None = None
    worst_name: str = ""
    curve: float | None = None
    refused: str = ""

    @property
    def fails(self) -> bool:
        if self.refused or self.precision != "fp32":
            return False
        limit = LIMITS["gradient with cp" if "cp" in self.mesh else "gradient"]
        assert self.loss is not None
        assert self.gradient is not None
        assert self.curve is not None
        return max(self.loss, self.gradient) > limit or self.curve > LIMITS["curve"]


def parallel_of(mesh: str) -> tuple[ParallelConfig, str]:
    """The sizes of the axes and the `sync` that a name such as dp2-tp2 or dp2+zero3 means."""
    axes, _, sync = mesh.partition("+")
    sizes = {part[:2]: int(part[2:]) for part in axes.split("-")}
    config = ParallelConfig(
        data_parallel=sizes.get("dp", 1),
        tensor_parallel=sizes.get("tp", 1),
        pipeline_parallel=sizes.get("pp", 1),
        context_parallel=sizes.get("cp", 1),
    )
    return config, sync or "allreduce"


def batches_of(family: Family) -> list[Any]:
    """Batches whose rows and lengths differ; 13 positions divide by nothing."""
    return [family.batch(ROWS - step % 2, SEQUENCE + step % 3) for step in range(STEPS)]


def reference_losses(module: torch.nn.Module, family: Family, batches: Sequence[Any], precision: str) -> list[float]:
    """The same training in this process."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, eps=EPS)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = run_module(module, batch, family.loss)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def trainer_of(mesh: Session, family: Family, module: torch.nn.Module, name: str, precision: str) -> Trainer:
    parallel, sync = parallel_of(name)
    stages = parallel.pipeline_parallel
    model = DistributedModel(
        copy.deepcopy(module),
        stage_mapping=StageMapping(family.stages(stages)) if stages > 1 else None,
        tp_spec=ShardingSpec(SPECS[family.name]) if parallel.tensor_parallel > 1 else None,
    )
    return Trainer(
        model,
        parallel=parallel,
        sync=sync,
        precision=precision,
        loss=family.loss,
        lr=LR,
        optimizer_options={"eps": EPS},
        micro_batches=2,
        name=f"parity-{family.name}".replace("_", "-"),
        progress=False,
        session=mesh,
    )


def measure(mesh: Session, family: Family, name: str, precision: str, expected: Sequence[float]) -> Cell:
    here = functools.partial(Cell, model=family.name, mesh=name, precision=precision)
    batches = batches_of(family)
    try:
        with trainer_of(mesh, family, family.build(), name, precision) as trainer:
            parity = trainer.check_parity(batches[0])
            losses = trainer.fit(batches).losses
    except UserError as error:
        return here(refused=str(error).splitlines()[0])
    return here(
        loss=parity.loss_difference,
        gradient=parity.gradient_difference,
        worst=parity.worst_gradient[1],
        worst_name=parity.worst_gradient[0],
        curve=max(relative_loss_difference(ours, right) for ours, right in zip(losses, expected, strict=True)),
    )


def known(options: argparse.Namespace) -> dict[tuple[str, str, str], Cell]:
    """What an earlier run has written, where this one is to go on with it."""
    path = options.write / "parity.json" if options.resume and options.write else None
    if path is None or not path.exists():
        return {}
    cells = [Cell(**row) for row in json.loads(path.read_text())["cells"]]
    return {(cell.model, cell.mesh, cell.precision): cell for cell in cells}


def measured(options: argparse.Namespace, found: Mapping[tuple[str, str, str], Cell]) -> Iterator[Cell]:
    most = max(parallel_of(name)[0].world_size for name in options.meshes)
    with session("local", workers=most, nodes=2) as mesh:
        for model in options.models:
            family = FAMILIES[model]
            for precision in options.precisions:
                expected = reference_losses(family.build(), family, batches_of(family), precision)
                for name in options.meshes:
                    if (model, name, precision) in found:
                        continue
                    if precision == "fp32" or name in SHORT:
                        yield measure(mesh, family, name, precision, expected)


def in_order(found: Mapping[tuple[str, str, str], Cell]) -> list[Cell]:
    """By model, then precision, then mesh."""

    def place(cell: Cell) -> tuple[int, ...]:
        return MODELS.index(cell.model), ("fp32", "bf16").index(cell.precision), MESHES.index(cell.mesh)

    return sorted(found.values(), key=place)


def show(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def line(cell: Cell) -> str:
    if cell.refused:
        return f"| {cell.model} | {cell.mesh} | {cell.precision} | refused: {cell.refused} | | | |"
    figures = " | ".join(show(value) for value in (cell.loss, cell.gradient, cell.worst, cell.curve))
    return f"| {cell.model} | {cell.mesh} | {cell.precision} | {figures} |"


COLUMNS = ("model", "mesh", "precision", "loss", "whole gradient", "worst parameter", "loss over 20 steps")
HEADER = f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|"

INTRODUCTION = """# Parity with one process

`make parity`, {date}, {machine}, CPU build of torch {torch}: real worker processes over a hub, two supervisors
and the TLS data plane, against the eager module in one process. The batch has 5 rows of 13 positions, so replicas,
micro-batches and shards of the sequence all differ in size; each replica runs two micro-batches; labels are partly
ignored. Models are tiny and random; `tests/program/program_families.py` builds them, `benchmarks/parity.py` has the
sharding specs.

Differences are relative, norm over norm: of the loss; of the gradient as a whole; of the worst single parameter (one
whose gradient is zero but for rounding is measured against 1e-4 of the largest); of the loss in each of 20 steps of
AdamW (lr 1e-3, eps 1e-6), batches of changing size. In bf16 both sides compute in bfloat16, the reference under
`torch.autocast("cpu", torch.bfloat16)`: there the figures say how much sums in another order change, at a rounding of
4e-3, and no limit is set. Limits in fp32: loss and whole gradient 1e-6 (1e-5 with cp), curve 1e-5; the command fails
beyond them. The same figures as data: [parity.json](parity.json).

Largest in fp32: {summary}.

"""


def summary(cells: Sequence[Cell]) -> str:
    exact = [cell for cell in cells if cell.precision == "fp32" and not cell.refused]
    parts = []
    for what, chosen in (("without cp", False), ("with cp", True)):
        some = [cell for cell in exact if ("cp" in cell.mesh) is chosen]
        if some:
            figures = [
                max(getattr(cell, key) or 0.0 for cell in some) for key in ("loss", "gradient", "worst", "curve")
            ]
            parts.append(
                "{}: loss {}, whole gradient {}, single parameter {}, curve {}".format(what, *map(show, figures))
            )
    return "; ".join(parts)


def write(folder: Path, cells: Sequence[Cell]) -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"a {platform.machine()} {platform.system()} machine with 2 cores"
    head = {"command": "make parity", "date": date, "machine": machine, "torch": torch.__version__, "limits": LIMITS}
    rows = [{key: value for key, value in asdict(cell).items() if value not in (None, "")} for cell in cells]
    (folder / "parity.json").write_text(json.dumps({**head, "cells": rows}, indent=1) + "\n")
    text = INTRODUCTION.format(date=date, machine=machine, torch=torch.__version__, summary=summary(cells))
    (folder / "parity.md").write_text(text + "\n".join([HEADER, *map(line, cells)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--meshes", type=lambda text: text.split(","), default=list(MESHES))
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["fp32", "bf16"])
    parser.add_argument("--write", type=Path, help="the folder that parity.json and parity.md go to")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the file there holds already")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADER)
    found = known(options)
    for cell in measured(options, found):
        found[cell.model, cell.mesh, cell.precision] = cell
        cells = in_order(found)
        print(line(cell) + (" FAILS" if cell.fails else ""), flush=True)
        if options.write:
            write(options.write, cells)
    cells = in_order(found)
    print(f"\nLargest in fp32: {summary(cells)}")
    return 1 if any(cell.fails for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
