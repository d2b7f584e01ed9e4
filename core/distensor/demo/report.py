"""What the demo says at its end: as text for people, as one JSON object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberChange:
    """The first step of a new epoch: how long it took, the change of members included, and how many replicas did it."""

    step: int
    epoch: int
    replicas: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Figures of one run. Differences are relative; bytes are sums over the run, counted by the sender."""

    steps: int
    parameters: int
    parallel: str
    loss_first: float
    loss_last: float
    loss_difference: float
    weight_difference: float
    tokens_per_second: float
    tokens_per_second_one_process: float
    bytes_per_link: Mapping[str, int]
    restarts: int
    credits: Mapping[str, float]
    credits_expected: float
    members: tuple[MemberChange, ...] = ()
    """Workers were lost, or came, while the job ran."""

    @property
    def max_relative_difference(self) -> float:
        return max(self.loss_difference, self.weight_difference)

    @property
    def passed(self) -> bool:
        """The loss fell, and the mesh computed what one process computes."""
        return self.loss_last < self.loss_first and self.max_relative_difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            **asdict(self),
            "max_relative_difference": self.max_relative_difference,
            "passed": self.passed,
        }

    def lines(self) -> list[str]:
        verdict = "equal to one process" if self.max_relative_difference <= TOLERANCE else "NOT equal to one process"
        credit = ", ".join(f"{node} {amount:.3f}" for node, amount in sorted(self.credits.items()))
        return [
            "",
            f"trained   {self.parameters:,} parameters, {self.steps} steps, {self.parallel}",
            f"loss      {self.loss_first:.4f} -> {self.loss_last:.4f}",
            f"exact     {verdict}: largest relative difference {self.max_relative_difference:.2e} "
            f"(loss {self.loss_difference:.2e}, weights {self.weight_difference:.2e}; limit {TOLERANCE:.0e})",
            f"speed     {self.tokens_per_second:,.0f} tokens/s on the mesh, "
            f"{self.tokens_per_second_one_process:,.0f} in one process (one thread) on the same machine",
            "links     " + "\n          ".join(_link_lines(self.bytes_per_link)),
            *[
                f"{'members' if index == 0 else '':<9} step {change.step}: epoch {change.epoch}, "
                f"{change.replicas} replica{'s' if change.replicas > 1 else ''}, after {change.seconds:.2f} s"
                for index, change in enumerate(self.members)
            ],
            f"restarts  {self.restarts}",
            f"credits   {credit} (expected {self.credits_expected:.3f} in all)",
            "",
        ]


def _link_lines(bytes_per_link: Mapping[str, int]) -> list[str]:
    """Links that carry something, the busiest first; those below a hundredth of all bytes in one line."""
    least = sum(bytes_per_link.values()) / 100
    busy = sorted((item for item in bytes_per_link.items() if item[1] >= least), key=lambda item: (-item[1], item[0]))
    quiet = [count for count in bytes_per_link.values() if count < least]
    lines = [f"{name:<18} {human_bytes(count):>10}" for name, count in busy]
    if quiet:
        lines.append(f"{len(quiet)} more links {human_bytes(sum(quiet)):>12} together")
    return lines


def human_bytes(count: int) -> str:
    """
    >>> human_bytes(1500)
    '1.5 kB'
    """
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")
