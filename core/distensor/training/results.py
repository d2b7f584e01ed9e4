"""What training hands back: results of steps, of a fit, of a comparison with one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on one rank after a step: the weights that it keeps between steps, what goes with them (the optimizer's
    tensors, masters, the moving average), and the most that both and the gradients took at any moment of the step.
    Buffers and activations are not counted."""

    weights: int
    optimizer: int
    peak: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaTraffic:
    """Bytes between replicas in one step, of the rank that sent most, counted on the sockets by the senders.

    `up` is what that rank sent to the other replicas, `down` what they sent to it: updates or gradients and the sums of
    the step. `dense` is one copy of its gradients in fp32, and `ring` what a ring all-reduce of them sends up (and
    down).
    """

    up: int
    down: int
    dense: int
    ring: int

    @property
    def reduction(self) -> float:
        """How many times fewer bytes than a ring all-reduce the busiest direction had."""
        return self.ring / max(self.up, self.down, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One committed optimizer step.

    `loss` is the mean over the real elements of the whole batch, before the update. `tokens` is the number of those
    elements. `memory` is by rank. Bytes are counted on the sockets of the trainer: what left it and what reached it.
    Seconds are the slowest rank's, and `slowest` says which rank computed longest.
    """

    step: int
    loss: float
    tokens: int
    grad_norm: float
    lr: float
    bytes_sent: int
    bytes_received: int
    seconds: float
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    warm_up: tuple[int, ...] = ()
    """Forwards that each rank of a pipeline ran ahead, where 1F1B chose them from measured stages and links."""
    memory: tuple[RankMemory, ...] = ()
    slowest: str = ""
    replicas: ReplicaTraffic | None = None
    """None where there is one replica."""
    dropped: tuple[int, ...] = ()
    """Replicas whose update was no finite number, or did not come: this step is without them."""
    clipped: tuple[int, ...] = ()
    """Replicas of whose update more than half was taken away, since it was much larger than those of most."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pairs of replicas that sent the same entries, as honest ones do not: one copies the other, or both see the same
    data."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierStep:
    """A step that was committed under the trainer before this one, as the workers remember it."""

    step: int
    loss: float
    tokens: int
    grad_norm: float


@dataclass(slots=True)
class History:
    """The steps of one `fit`, oldest first; `earlier` are those before it, where a job was taken over (the newest
    4096)."""

    steps: list[StepResult] = field(default_factory=list)
    earlier: tuple[EarlierStep, ...] = ()

    def add(self, result: StepResult) -> None:
        """The next step. One that was taken before, and was lost with the workers, is replaced by its repetition."""
        while self.steps and self.steps[-1].step >= result.step:
            self.steps.pop()
        self.steps.append(result)

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.steps]

    @property
    def tokens(self) -> int:
        return sum(result.tokens for result in self.steps)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.steps)

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """The same batch through the mesh and through one process.

    A relative difference is the norm of the difference over the norm of the reference: of the loss, of the gradient
    as a whole, and of each parameter's gradient alone (those that are zero but for rounding are measured against
    1e-4 of the largest).
    """

    loss: float
    reference_loss: float
    loss_difference: float
    gradient_difference: float
    gradient_differences: Mapping[str, float]

    @property
    def worst_gradient(self) -> tuple[str, float]:
        """(parameter name, its own difference); ("", 0.0) for a model with nothing to train."""
        return max(self.gradient_differences.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def max_relative_difference(self) -> float:
        return max(self.loss_difference, self.worst_gradient[1])
