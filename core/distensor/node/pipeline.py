"""Runs the action list of one pipeline rank over tagged queues.

Nothing here knows which schedule the list came from. Every message is found by (channel, step, micro-batch, stage),
so an order that differs between ranks costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from distensor.core import DRIVER_RANK
from distensor.core.clock import Clock
from distensor.core.errors import FrameError, ProgramRejectedError
from distensor.core.schedules import Action, Phase
from distensor.node.faults import FaultPhase
from distensor.node.held_bytes import counting_held_bytes
from distensor.node.seeds import dropout_seed
from distensor.program import Source, WeightGradients
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.tensors import decode, encode

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.pacer import Pacer
    from distensor.program import StageProgram, StageRunner
    from distensor.sync import WeightStore
    from distensor.transport import SendHandle

Batch = Mapping[str, "Tensor"]


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums over the micro-batches that this rank has run. Loss and weight stay 0 on ranks without the last stage."""

    loss_times_weight: float = 0.0
    weight: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    wait_seconds: float = 0.0
    in_flight: int = 0
    """The most micro-batches (of one stage each) whose activations were held at once."""
    held_bytes: int = 0
    """What the first forward kept for its backward, where that was to be measured."""
    message_bytes: dict[int, int] = field(default_factory=dict)
    """The largest message to each peer."""

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(kw_only=True, slots=True)
class _Held:
    """What one forward leaves behind for its backward."""

    received: list[Tensor]
    outputs: list[Tensor]
    put_off: WeightGradients | None
    loss: Tensor | None = None
    weight: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Run:
    """The state of one call of `run`."""

    sequence: int
    step: int
    batches: Sequence[Batch]
    training: bool
    split: bool
    measure: bool
    replica: int
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    put_off: dict[tuple[int, int], WeightGradients] = field(default_factory=dict)
    local: dict[tuple[Channel, int, int], list[Tensor]] = field(default_factory=dict)
    sends: list[SendHandle] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


class PipelineExecutor:
    """One rank's stages of one replica.

    Args:
        runners: the stages of this rank, by stage index.
        rank_of_stage: where each stage of this replica lives.
        seed: of the job; dropout draws from (seed, step, replica, micro-batch, place in the model).
        weights: is told which stage comes next; None where the runners' weights are always there.
        pacer: says when to rest after a pass of a micro-batch; None for never.
        reach: told of each pass, with the number of the step.
    """

    def __init__(
        self,
        *,
        plane: DataPlane,
        rank: int,
        runners: Mapping[int, StageRunner],
        rank_of_stage: Sequence[int],
        device: torch.device,
        clock: Clock,
        seed: int,
        replica: int,
        weights: WeightStore | None = None,
        pacer: Pacer | None = None,
        reach: Callable[[FaultPhase, int], None] = lambda _phase, _step: None,
    ) -> None:
        self._reach = reach
        self._plane = plane
        self._rank = rank
        self._runners = runners
        self._rank_of_stage = rank_of_stage
        self._device = device
        self._clock = clock
        self._seed = seed
        self._replica = replica
        self._weights = weights
        self._pacer = pacer

    def run(
        self,
        sequence: int,
        actions: Sequence[Action],
        batches: Sequence[Batch],
        *,
        training: bool,
        measure: bool = False,
        step: int = 0,
        replica: int | None = None,
    ) -> Totals:
        """Run `actions`; gradients of sum(weight * loss) accumulate in the parameters when the list has backwards.

        `sequence` must differ between calls: it separates their messages. With `measure`, the memory that the first
        forward keeps is counted. `step` is what dropout draws from, so that a run that was resumed draws what it would
        have drawn; so is `replica`, by default this rank's own.

        Raises:
            PeerLostError: a neighbour went away.
        """
        split = any(action.phase is Phase.WEIGHT_GRADIENT for action in actions)
        run = _Run(
            sequence=sequence,
            step=step,
            batches=batches,
            training=training,
            split=split,
            measure=measure,
            replica=self._replica if replica is None else replica,
        )
        if self._weights is not None:
            self._weights.expect(action.stage for action in actions)
        with torch.set_grad_enabled(training):
            for action in actions:
                if self._weights is not None:
                    self._weights.turn_to(action.stage, gradients=action.phase is not Phase.FORWARD)
                if action.micro_batch < len(batches):  # others of the group may have more, and the weights are shared
                    self._act_and_rest(run, action)
        if self._weights is not None:
            self._weights.release()
        for handle in run.sends:
            handle.wait(None)
        return run.totals

    def _act_and_rest(self, run: _Run, action: Action) -> None:
        before = run.totals.compute_seconds
        self._act(run, action)
        if self._pacer is not None:
            self._pacer.rest(run.totals.compute_seconds - before)

    @property
    def _paced(self) -> bool:
        return self._pacer is not None and self._pacer.duty < 1.0

    def _act(self, run: _Run, action: Action) -> None:
        if run.training:
            self._reach(FaultPhase.FORWARD if action.phase is Phase.FORWARD else FaultPhase.BACKWARD, run.step)
        match action.phase:
            case Phase.FORWARD:
                self._forward(run, action.stage, action.micro_batch, keep=run.training)
            case Phase.WEIGHT_GRADIENT:
                self._weight_gradients(run, action.stage, action.micro_batch)
            case Phase.INPUT_GRADIENT | Phase.BACKWARD:
                self._backward(run, action.stage, action.micro_batch)
                if run.split and action.phase is Phase.BACKWARD:
                    self._weight_gradients(run, action.stage, action.micro_batch)

    def _forward(self, run: _Run, stage: int, micro: int, *, keep: bool) -> None:
        runner = self._runners[stage]
        program = runner.program
        specs = program.inputs_from(Source.PREVIOUS)
        received = self._receive(run, Channel.ACTIVATION, stage - 1, stage, micro, len(specs)) if specs else []
        for spec, tensor in zip(specs, received, strict=True):
            if spec.requires_grad and run.training:
                tensor.requires_grad_()
        inputs = {spec.name: tensor for spec, tensor in zip(specs, received, strict=True)}
        inputs.update(self._batch_inputs(program, run.batches[micro]))
        started = self._clock.monotonic()
        seed = dropout_seed(self._seed, run.step, run.replica, micro)
        held = _Held(received=received, outputs=[], put_off=WeightGradients() if run.split else None)
        with self._counting(run, runner):
            outputs = runner.forward(inputs, seed=seed, training=run.training, put_off=held.put_off)
        if program.is_last:
            self._take_loss(run, program, outputs, held)
        else:
            held.outputs = [outputs[spec.name] for spec in program.outputs]
        run.totals.forward_seconds += self._since(run, started)
        if not program.is_last:
            self._send(run, Channel.ACTIVATION, stage + 1, stage + 1, micro, [t.detach() for t in held.outputs])
        if keep:
            run.held[stage, micro] = held
            run.totals.in_flight = max(run.totals.in_flight, len(run.held) + len(run.put_off))

    def _since(self, run: _Run, started: float) -> float:
        """Seconds; a step that is measured or paced waits for what an accelerator was only told to do."""
        if (run.measure or self._paced) and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock.monotonic() - started

    @contextmanager
    def _counting(self, run: _Run, runner: StageRunner) -> Iterator[None]:
        if not run.measure or run.totals.held_bytes:
            yield
            return
        with counting_held_bytes([*runner.parameters.values(), *runner.buffers.values()]) as held:
            yield
        run.totals.held_bytes = held.total + runner.kept_bytes

    def _batch_inputs(self, program: StageProgram, batch: Batch) -> dict[str, Tensor]:
        names = [spec.name for spec in program.inputs_from(Source.BATCH)]
        missing = [name for name in names if name not in batch]
        if missing:
            raise ProgramRejectedError(f"stage {program.stage} needs {missing} of the batch; it holds {sorted(batch)}")
        return {name: batch[name].to(self._device) for name in names}

    def _take_loss(self, run: _Run, program: StageProgram, outputs: Mapping[str, Tensor], held: _Held) -> None:
        assert program.loss is not None
        assert program.weight is not None
        loss, weight = outputs[program.loss], outputs[program.weight]
        held.loss, held.weight = loss, float(weight)
        if held.weight > 0:  # a mean over nothing is not a number; it must not reach the sum
            run.totals.loss_times_weight += float(loss.detach()) * held.weight
            run.totals.weight += held.weight

    def _backward(self, run: _Run, stage: int, micro: int) -> None:
        held = run.held.pop((stage, micro))
        program = self._runners[stage].program
        if program.is_last:
            roots, seeds = self._loss_root(held)
        else:
            roots, seeds = self._received_root(run, program, held, stage, micro)
        started = self._clock.monotonic()
        if roots:
            torch.autograd.backward(roots, seeds)
        wanted = [tensor for tensor in held.received if tensor.requires_grad]
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]
        run.totals.backward_seconds += self._since(run, started)
        if held.put_off is not None:
            run.put_off[stage, micro] = held.put_off
        if gradients:
            self._send(run, Channel.GRADIENT, stage - 1, stage - 1, micro, gradients)

    def _weight_gradients(self, run: _Run, stage: int, micro: int) -> None:
        started = self._clock.monotonic()
        run.put_off.pop((stage, micro)).run()
        run.totals.backward_seconds += self._since(run, started)

    def _loss_root(self, held: _Held) -> tuple[list[Tensor], list[Tensor]]:
        loss = held.loss
        if loss is None or held.weight == 0 or not loss.requires_grad:
            return [], []
        return [loss], [torch.full_like(loss, held.weight)]

    def _received_root(
        self, run: _Run, program: StageProgram, held: _Held, stage: int, micro: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        expected = [tensor for spec, tensor in zip(program.outputs, held.outputs, strict=True) if spec.requires_grad]
        if not expected:
            return [], []
        gradients = self._receive(run, Channel.GRADIENT, stage + 1, stage, micro, len(expected))
        for out, gradient in zip(expected, gradients, strict=True):
            if out.shape != gradient.shape or out.dtype != gradient.dtype:
                raise FrameError(
                    f"rank {self._rank_of_stage[stage + 1]} sent a gradient of {tuple(gradient.shape)} "
                    f"{gradient.dtype} for an output of {tuple(out.shape)} {out.dtype}"
                )
        pairs = [(out, grad) for out, grad in zip(expected, gradients, strict=True) if out.requires_grad]
        return [out for out, _ in pairs], [grad for _, grad in pairs]

    def _send(self, run: _Run, channel: Channel, to_stage: int, slot: int, micro: int, tensors: list[Tensor]) -> None:
        peer = self._rank_of_stage[to_stage]
        if peer == self._rank:
            run.local[channel, slot, micro] = tensors
            return
        header, buffers = encode(tensors)
        tag = Tag(channel=channel, step=run.sequence, micro=micro, slot=slot)
        size = len(header) + sum(map(len, buffers))
        run.totals.message_bytes[peer] = max(size, run.totals.message_bytes.get(peer, 0))
        run.sends.append(self._plane.send(peer, tag, header, buffers))

    def _receive(self, run: _Run, channel: Channel, from_stage: int, slot: int, micro: int, count: int) -> list[Tensor]:
        peer = self._rank_of_stage[from_stage]
        if peer == self._rank:
            return [tensor.detach() for tensor in run.local.pop((channel, slot, micro))]
        started = self._clock.monotonic()
        tag = Tag(channel=channel, step=run.sequence, micro=micro, slot=slot)
        # Whichever worker is lost, this wait is in vain: the lost one may be behind the peer that is asked.
        needed = self._plane.peers - {DRIVER_RANK}
        tensors = decode(self._plane.recv(peer, tag, None, needed=needed))
        run.totals.wait_seconds += self._clock.monotonic() - started
        if len(tensors) != count:
            raise FrameError(f"rank {peer} sent {len(tensors)} tensors for {tag}; the programs say {count}")
        # Whether a tensor requires a gradient is what our program says, not what a peer's header says.
        return [tensor.detach().to(self._device) for tensor in tensors]
