"""`TransportGroup`: torch's ProcessGroup interface, in terms of our collectives.

torch calls some operations by several names (new, older, coalesced); all of them are here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from distensor.core.clock import Clock
from distensor.core.errors import ConfigError, UnsupportedOptionError
from distensor.transport import collectives
from distensor.transport.exchange import Exchange, group_slot
from distensor.transport.flat import Target, even_pieces, flat_source, split_rows
from distensor.transport.group_thread import GroupThread
from distensor.transport.messages import Messenger
from distensor.transport.plane import DataPlane
from distensor.transport.reduction import Reduction, check_reducible
from distensor.transport.works import CollectiveWork, MessageWork

if TYPE_CHECKING:
    # torch's stub lists overloads that only its C++ side offers to callers; nobody calls them on a subclass.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...
else:
    _ProcessGroup = dist.ProcessGroup

BACKEND = "distensor"

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, Reduction.SUM),
    (dist.ReduceOp.AVG, Reduction.AVG),
    (dist.ReduceOp.PRODUCT, Reduction.PRODUCT),
    (dist.ReduceOp.MIN, Reduction.MIN),
    (dist.ReduceOp.MAX, Reduction.MAX),
    (dist.ReduceOp.BAND, Reduction.BAND),
    (dist.ReduceOp.BOR, Reduction.BOR),
    (dist.ReduceOp.BXOR, Reduction.BXOR),
)


def reduction_of(op: Any) -> Reduction:
    """Our name for torch's reduce op.

    Raises:
        UnsupportedOptionError: premul_sum, or one that torch may add.
    """
    for theirs, ours in _REDUCTIONS:
        if op == theirs:
            return ours
    raise UnsupportedOptionError(f"reduce op {op} is not implemented; use one of {', '.join(Reduction)}")


class TransportGroup(_ProcessGroup):
    """A group of ranks that talk over a data plane."""

    def __init__(
        self, plane: DataPlane, ranks: Sequence[int], me: int, *, name: str, timeout: float, clock: Clock
    ) -> None:
        super().__init__(me, len(ranks))
        self._me = me
        self._ranks = tuple(ranks)
        self._name = name
        self._description = ""
        slot = group_slot(name, ranks)
        exchange = Exchange(plane, self._ranks, me, slot, timeout, clock)
        self._thread = GroupThread(exchange, name)
        self._messenger = Messenger(plane, self._ranks, slot, timeout)
        weakref.finalize(self, self._thread.stop)

    # -- who we are --------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._me

    def size(self) -> int:
        return len(self._ranks)

    getRank = rank
    getSize = size

    def name(self) -> str:
        return BACKEND

    getBackendName = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def group_desc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def shutdown(self) -> None:
        """Run what is queued, then end the group's thread."""
        self._thread.stop()

    def abort(self) -> None:
        self._thread.stop()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end after `shutdown`."""
        self._thread.join(timeout)

    def _submit(
        self,
        what: str,
        opts: Any,
        outputs: Sequence[Tensor],
        targets: Sequence[Target],
        run: Callable[[Exchange], None],
    ) -> CollectiveWork:
        work = CollectiveWork(f"{what} in group {self._name}", list(outputs))

        def run_and_store(exchange: Exchange) -> None:
            run(exchange)
            for target in targets:
                target.store()

        self._thread.submit(work, run_and_store, at_once=not getattr(opts, "asyncOp", True))
        return work

    # -- all-reduce, reduce, broadcast, barrier ----------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> CollectiveWork:
        op = _reduction_in(opts)
        for tensor in tensors:
            check_reducible(tensor.dtype, op)
        if len(tensors) == 1:
            target = Target(tensors[0], load=True)
            return self._submit(
                "all_reduce", opts, tensors, [target], partial(collectives.all_reduce, data=target.flat, op=op)
            )
        return self._submit("all_reduce", opts, tensors, [], partial(_all_reduce_many, tensors=tensors, op=op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        op, root = reduction_of(opts.reduceOp), int(opts.rootRank)
        target = Target(_only(tensors), load=True)
        check_reducible(target.flat.dtype, op)
        return self._submit(
            "reduce", opts, tensors, [target], partial(collectives.reduce, data=target.flat, op=op, root=root)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:
        root = int(opts.rootRank)
        target = Target(_only(tensors), load=True)
        return self._submit(
            "broadcast", opts, tensors, [target], partial(collectives.broadcast, data=target.flat, root=root)
        )

    def barrier(self, opts: Any = None) -> CollectiveWork:
        return self._submit("barrier", opts, [], [], collectives.barrier)

    # -- all-gather --------------------------------------------------------------------------------------------

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> CollectiveWork:
        source = flat_source(_only(inputs))
        self._check_count("all_gather", outputs[0])
        targets = [Target(tensor, load=False) for tensor in outputs[0]]
        _check_dtypes("all_gather", source, targets)
        outs = [target.flat for target in targets]
        return self._submit(
            "all_gather", opts, outputs[0], targets, partial(collectives.all_gather, outs=outs, data=source)
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        jobs = []
        targets = [Target(output, load=False) for output in outputs]
        for target, tensor in zip(targets, inputs, strict=True):
            source = flat_source(tensor)
            _check_dtypes("all_gather", source, [target])
            _check_total("all_gather", target.flat, source.numel() * self.size())
            jobs.append((even_pieces(target.flat, self.size(), "all_gather"), source))

        def run(exchange: Exchange) -> None:
            for outs, source in jobs:
                collectives.all_gather(exchange, outs, source)

        return self._submit("all_gather", opts, outputs, targets, run)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        # outputs[rank][index], unlike allgather's outputs[index][rank].
        works = [
            self.allgather([[row[index] for row in outputs]], [tensor], opts) for index, tensor in enumerate(inputs)
        ]
        return works[-1]

    # -- reduce-scatter ----------------------------------------------------------------------------------------

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> CollectiveWork:
        op = _reduction_in(opts)
        output, pieces = _only(outputs), [flat_source(tensor) for tensor in inputs[0]]
        self._check_count("reduce_scatter", pieces)
        target = Target(output, load=False)
        check_reducible(output.dtype, op)
        _check_total("reduce_scatter", target.flat, pieces[self._me].numel())
        return self._submit(
            "reduce_scatter",
            opts,
            outputs,
            [target],
            partial(collectives.reduce_scatter, out=target.flat, pieces=pieces, op=op),
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        op = _reduction_in(opts)
        jobs = []
        targets = [Target(output, load=False) for output in outputs]
        for target, tensor in zip(targets, inputs, strict=True):
            source = flat_source(tensor)
            check_reducible(source.dtype, op)
            _check_dtypes("reduce_scatter", source, [target])
            _check_total("reduce_scatter", source, target.flat.numel() * self.size())
            jobs.append((target.flat, even_pieces(source, self.size(), "reduce_scatter")))

        def run(exchange: Exchange) -> None:
            for out, pieces in jobs:
                collectives.reduce_scatter(exchange, out, pieces, op)

        return self._submit("reduce_scatter", opts, outputs, targets, run)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- all-to-all, gather, scatter ---------------------------------------------------------------------------

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> CollectiveWork:
        self._check_count("all_to_all", outputs)
        self._check_count("all_to_all", inputs)
        targets = [Target(tensor, load=False) for tensor in outputs]
        pieces = [flat_source(tensor) for tensor in inputs]
        outs = [target.flat for target in targets]
        return self._submit(
            "all_to_all", opts, outputs, targets, partial(collectives.all_to_all, outs=outs, pieces=pieces)
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> CollectiveWork:
        target, source = Target(output, load=False), flat_source(input)
        _check_dtypes("all_to_all", source, [target])
        outs = split_rows(output, target.flat, output_splits or (), self.size(), "all_to_all output")
        pieces = split_rows(input, source, input_splits or (), self.size(), "all_to_all input")
        return self._submit(
            "all_to_all", opts, [output], [target], partial(collectives.all_to_all, outs=outs, pieces=pieces)
        )

    alltoall_base = all_to_all_single

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> CollectiveWork:
        root, source = int(opts.rootRank), flat_source(_only(inputs))
        targets = [Target(tensor, load=False) for tensor in (outputs[0] if self._me == root else [])]
        if self._me == root:
            self._check_count("gather", targets)
        outs = [target.flat for target in targets]
        return self._submit(
            "gather",
            opts,
            outputs[0] if outputs else [],
            targets,
            partial(collectives.gather, outs=outs, data=source, root=root),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> CollectiveWork:
        root, target = int(opts.rootRank), Target(_only(outputs), load=False)
        pieces = [flat_source(tensor) for tensor in (inputs[0] if self._me == root else [])]
        if self._me == root:
            self._check_count("scatter", pieces)
        return self._submit(
            "scatter",
            opts,
            outputs,
            [target],
            partial(collectives.scatter, out=target.flat, pieces=pieces, root=root),
        )

    # -- single messages ---------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], member: int, tag: int) -> MessageWork:
        return self._messenger.send(_only(tensors), member, tag)

    def recv(self, tensors: list[Tensor], member: int, tag: int) -> MessageWork:
        return self._messenger.receive(_only(tensors), member, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MessageWork:
        raise UnsupportedOptionError("recv without a source rank is not implemented; name the rank to receive from")

    def _check_count(self, what: str, items: Sequence[object]) -> None:
        if len(items) != self.size():
            raise ConfigError(f"{what}: {len(items)} tensors for a group of {self.size()}; expected one per rank")


def _all_reduce_many(exchange: Exchange, tensors: Sequence[Tensor], op: Reduction) -> None:
    """All tensors of a dtype as one message."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        joined = torch.cat([flat_source(tensor) for tensor in group])
        collectives.all_reduce(exchange, joined, op)
        for tensor, part in zip(group, torch.split(joined, [tensor.numel() for tensor in group]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def _reduction_in(opts: Any) -> Reduction:
    """torch passes options; people who call a group's methods by hand may pass the op itself."""
    return Reduction.SUM if opts is None else reduction_of(getattr(opts, "reduceOp", opts))


def _only(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ConfigError(f"expected one tensor per rank, got {len(tensors)}")
    return tensors[0]


def _check_dtypes(what: str, source: Tensor, targets: Sequence[Target]) -> None:
    for target in targets:
        if target.flat.dtype != source.dtype:
            raise ConfigError(f"{what}: the input is {source.dtype} and the output {target.flat.dtype}")


def _check_total(what: str, tensor: Tensor, expected: int) -> None:
    if tensor.numel() != expected:
        raise ConfigError(f"{what}: a tensor of {tensor.numel()} elements where {expected} are needed")
