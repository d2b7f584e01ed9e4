"""What a job says to its ranks and asks of them, in one epoch: nothing here outlives the loss of a member."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from distensor.core import ParallelConfig, RankLayout
from distensor.core.digests import programs_digest
from distensor.core.errors import ConfigError
from distensor.core.regrouping import place_of
from distensor.optim import OptimizerSpec
from distensor.optim.updater import kept_dtype
from distensor.training.batches import row_count, row_major, split_rows
from distensor.training.checkpoint_model import model_tensors
from distensor.training.job_snapshot import JobSnapshot, copy_seconds, state_for, wanted_of, wholes_of
from distensor.training.notes import keepers
from distensor.training.replies import Reply, agreed, read_loss
from distensor.training.step_results import load_words, most_bytes, wanted_tensors
from distensor.transport.driver import WITNESS_PREFIX, Command

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.nn import DistributedModel
    from distensor.training.checkpoint_folder import Saved
    from distensor.training.connection import JobConnection
    from distensor.training.options import TrainerOptions
    from distensor.training.pieces import MeshPieces
    from distensor.training.replies import Layout
    from distensor.training.spot_checks import Check


class JobRanks:
    """The ranks of a placed job, each with its pieces of the model. Not safe to use from several threads.

    Every method raises WorkerLostError where a rank is lost meanwhile.
    """

    def __init__(
        self, *, connection: JobConnection, model: DistributedModel, pieces: MeshPieces, options: TrainerOptions
    ) -> None:
        self._connection = connection
        self._model = model
        self._options = options
        self._snapshots = 0
        self._row_inputs = row_major(pieces.first.batch_inputs)
        self.pieces = pieces
        self.idle: frozenset[int] = frozenset()
        """Replicas that get no rows: weights are still to come to them."""
        self.take_mesh(options.parallel)

    def take_mesh(self, parallel: ParallelConfig) -> None:
        """What follows from who the ranks are. Stages and their cut along tp and cp stay what they were."""
        self.pieces = replace(self.pieces, parallel=parallel)
        self.idle = frozenset()
        layout, ranks = RankLayout(parallel), range(parallel.world_size)
        self.replica_of = {rank: layout.coordinates(rank).dp for rank in ranks}
        self._keepers = keepers({rank: place_of(layout.coordinates(rank)) for rank in ranks})
        self._inputs_of_rank = {rank: self.pieces.inputs_of(rank) for rank in ranks}

    def ship(self, optimizer: OptimizerSpec) -> None:
        """Ship programs and the module's weights; optimizer and steps begin anew."""
        meta = load_words(self._options, self.pieces, optimizer)
        tensors = {rank: self._parts_of(rank) for rank in self._connection.ranks}
        self._connection.command(Command.LOAD, meta, tensors)

    def check_same(self, optimizer: OptimizerSpec, load: Mapping[str, Any], programs: Mapping[int, str]) -> None:
        """Raise ConfigError where the ranks hold another model or other settings than this job would ship."""
        own = json.loads(json.dumps(load_words(self._options, self.pieces, optimizer)))
        differ = sorted(key for key in own if _but_lr(own[key]) != _but_lr(load.get(key)))
        for rank, digest in programs.items():
            texts = {stage: program.to_json() for stage, program in self.pieces.programs_of(rank).items()}
            if digest != programs_digest(texts):
                differ.append(f"the program of rank {rank}")
        if differ:
            raise ConfigError(
                f"job {self._connection.job_id} cannot be taken over: its workers hold another "
                f"{', '.join(differ[:10])}; start the same script again, or end the job and go on from a checkpoint"
            )

    def _parts_of(self, rank: int) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for stage, program in self.pieces.programs_of(rank).items():
            parts[f"program/{stage}"] = torch.frombuffer(bytearray(program.to_json()), dtype=torch.uint8)
        for stage, weights in self.pieces.weights_of(rank).items():
            parts.update({f"weight/{stage}/{name}": tensor.detach() for name, tensor in weights.items()})
        return parts

    def split(self, batches: Sequence[Any]) -> list[list[dict[str, Tensor]]]:
        """The micro-batches of each replica, batch after batch; none for those that are idle."""
        parts: list[list[dict[str, Tensor]]] = [[] for _ in range(self.pieces.parallel.data_parallel)]
        working = [own for replica, own in enumerate(parts) if replica not in self.idle]
        for batch in batches:
            flat = self.pieces.first.flatten_batch(batch)
            rows = row_count(flat, self._row_inputs)
            split = split_rows(rows, replicas=len(working), micro_batches=self._options.micro_batches)
            cut_rows = iter(self.pieces.first.split_rows(flat, split.sizes))
            for own, count in zip(working, split.micro_batches, strict=True):
                own.extend(itertools.islice(cut_rows, count))
        return parts

    def send(
        self,
        command: Command,
        meta: Mapping[str, Any],
        parts: Sequence[Sequence[Mapping[str, Tensor]]],
        layouts: Mapping[int, Layout] | None = None,
        note: Mapping[str, Tensor] | None = None,
        check: Check | None = None,
    ) -> list[Reply]:
        """Give each rank the inputs that it reads of `parts`, and its own part of the answer's `layouts`.
        `note` goes to those that keep notes, and what the target of `check` gets to its witnesses as well."""
        layouts = layouts or {}
        wanted = wanted_tensors(layouts)
        extra: dict[int, dict[str, Any]] = {
            rank: {"micro_batches": len(parts[replica]), **wanted.get(rank, {})}
            for rank, replica in self.replica_of.items()
        }
        tensors = {rank: self._inputs_of(rank, parts) for rank in self.replica_of}
        for rank in self._keepers if note else ():
            tensors[rank] |= note or {}
        if check is not None:
            words, batch = self._witnessed(check, parts)
            for rank in check.witnesses:
                extra[rank] |= words
                tensors[rank] |= batch
        return self._connection.command(command, meta, tensors, extra, most_bytes(layouts))

    def _inputs_of(self, rank: int, parts: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """The slices of the batch that this rank's stages read, by "micro/name"."""
        names, own = self._inputs_of_rank[rank], parts[self.replica_of[rank]]
        return {f"{micro}/{name}": part[name] for micro, part in enumerate(own) for name in names}

    def _witnessed(
        self, check: Check, parts: Sequence[Sequence[Mapping[str, Tensor]]]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        replica = self.replica_of[check.target]
        batch = {f"{WITNESS_PREFIX}{name}": tensor for name, tensor in self._inputs_of(check.target, parts).items()}
        return {"witness": {"replica": replica, "micro_batches": len(parts[replica])}}, batch

    def mean_rows(self, parts: Sequence[Sequence[Mapping[str, Tensor]]]) -> float:
        """Rows of one micro-batch of `parts`."""
        rows = [len(part[self._row_inputs[0]]) for own in parts for part in own]
        return sum(rows) / len(rows)

    def evaluate(self, batch: Any) -> tuple[float, float]:
        """(mean loss, number of real elements)."""
        return agreed_loss(self.send(Command.EVALUATE, {}, self.split([batch])))

    def gradients(self, batches: Sequence[Any], step: int) -> tuple[float, dict[str, Tensor]]:
        """(mean loss over all `batches`, full gradients by parameter name), with the dropout of `step`."""
        layouts = self.pieces.replies(gradients=True)
        replies = self.send(Command.GRADIENTS, {"step": step}, self.split(batches), layouts)
        return agreed_loss(replies)[0], self.pieces.merge(replies, layouts)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the module, whole, from the first replica."""
        layouts = self.pieces.replies(gradients=False)
        replies = self._collect({}, layouts)
        fresh = self.pieces.merge(replies, layouts)
        module = self._model.module
        kept = module.state_dict().keys()
        return {
            name: fresh[name] if name in fresh else tensor.detach().clone()
            for name, tensor in named_tensors(module).items()
            if name in kept
        }

    def averages(self) -> dict[str, Tensor]:
        """The moving average of the trainable weights."""
        layouts = {
            rank: {key: (kept_dtype(dtype), shape) for key, (dtype, shape) in layout.items()}
            for rank, layout in self.pieces.replies(gradients=True).items()
        }
        replies = self._collect({"averages": True}, layouts)
        return self.pieces.merge(replies, layouts)

    def _collect(self, meta: Mapping[str, Any], layouts: Mapping[int, Layout]) -> list[Reply]:
        wanted, most = wanted_tensors(layouts), most_bytes(layouts)
        return self._connection.command(Command.STATE, meta, extra=wanted, most_bytes=most)

    def push(self) -> None:
        """Send the module's present weights."""
        current = named_tensors(self._model.module).keys()
        tensors = {
            rank: {
                f"{stage}/{name}": tensor
                for stage, weights in self.pieces.weights_of(rank).items()
                for name, tensor in weights.items()
                if name in current
            }
            for rank in self._connection.ranks
        }
        self._connection.command(Command.REPLACE, {}, tensors)

    def snapshot(self, optimizer: OptimizerSpec) -> JobSnapshot:
        """Let all ranks copy what they hold."""
        self._snapshots += 1
        wanted = {rank: {"wanted": keys} for rank, keys in wanted_of(self.pieces, optimizer).items()}
        replies = self._connection.command(Command.SNAPSHOT, {"number": self._snapshots}, extra=wanted)
        tensors = model_tensors(self._model.module).tensors
        return JobSnapshot(
            number=self._snapshots,
            reader=self._connection.snapshots,
            wholes=wholes_of(self.pieces, optimizer, list(tensors), replies),
            module=tensors,
            copy_seconds=copy_seconds(replies),
        )

    def restore(self, saved: Saved) -> None:
        """Bring the optimizer state of a checkpoint to the ranks."""
        tensors = {rank: state_for(self.pieces, saved, rank) for rank in self._connection.ranks}
        self._connection.command(Command.RESTORE, {}, tensors)


def agreed_loss(replies: Sequence[Reply]) -> tuple[float, float]:
    """(mean loss, number of real elements), the same from all ranks. Raises WorkerFailedError where it is not."""
    answers = [read_loss(reply) for reply in replies]
    loss = agreed(replies, "loss", [answer.loss for answer in answers])
    return loss, agreed(replies, "weight", [answer.weight for answer in answers])


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those included that a state dict leaves out."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _but_lr(words: Any) -> Any:
    """The learning rate comes with each step."""
    return {key: value for key, value in words.items() if key != "lr"} if isinstance(words, Mapping) else words
