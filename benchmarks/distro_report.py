"""Tables and plots of what `benchmarks/distro.py` measured: validation loss against bytes sent, for each size.

Prints one table a size, as Markdown, and draws docs/distro-SIZE.svg. For each method the rate with the lowest loss of
the first seed counts, and the mean over all seeds that ran at it. Drawing needs matplotlib (`pip install '.[bench]'`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

BASELINE = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One method at one size."""

    method: str
    rate: float
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """One a seed, at `rate`."""
    sent: float
    """Bytes of one worker's message, a step."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def rows_of(runs: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, int], list[Row]]:
    """Rows by size and steps, the baseline first, then by loss."""
    found: dict[tuple[str, int, str], dict[tuple[float, int], Mapping[str, float]]] = defaultdict(dict)
    for key, run in runs.items():
        size, steps, method, rate, seed = key.split("/")
        found[size, int(steps), method][float(rate), int(seed)] = run
    tables: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for (size, count, method), by_rate in found.items():
        tables[size, count].append(_row(method, by_rate))
    for rows in tables.values():
        rows.sort(key=lambda row: (row.method != BASELINE, row.loss))
    return dict(tables)


def _row(method: str, runs: Mapping[tuple[float, int], Mapping[str, float]]) -> Row:
    rate = min((rate for rate, seed in runs if seed == 0), key=lambda rate: runs[rate, 0]["loss"])
    return Row(
        method=method,
        rate=rate,
        rates=tuple(sorted({rate for rate, _ in runs})),
        losses=tuple(run["loss"] for (other, _), run in sorted(runs.items()) if other == rate),
        sent=runs[rate, 0]["bytes_sent_a_step"],
    )


def table(rows: Iterable[Row]) -> str:
    rows = list(rows)
    base = rows[0] if rows and rows[0].method == BASELINE else None
    lines = [
        "| method | best rate (of) | seeds | loss (lowest, highest) | to AdamW | sent, bytes a step | less |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gap = "" if base is None or row is base else f"{100 * (row.loss / base.loss - 1):+.1f} %"
        less = "" if base is None else f"{base.sent / row.sent:,.0f}x"
        lines.append(
            f"| {row.method} | {row.rate:g} ({', '.join(f'{rate:g}' for rate in row.rates)}) | {len(row.losses)} "
            f"| {row.loss:.3f} ({min(row.losses):.3f}, {max(row.losses):.3f}) | {gap} | {row.sent:,.0f} | {less} |"
        )
    return "\n".join(lines)


def draw(title: str, rows: Iterable[Row], path: Path) -> None:
    """Loss over bytes, bytes on a logarithmic axis; bars from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "distensor"  # the same numbers give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for row in rows:
        spread = [[row.loss - min(row.losses)], [max(row.losses) - row.loss]]
        marker = "s" if row.method == BASELINE else "o" if row.method.startswith("distro-adamw") else "^"
        axes.errorbar(row.sent, row.loss, yerr=spread, fmt=marker, capsize=2)
        aside = {"xytext": (-5, 4), "ha": "right"} if row.method == BASELINE else {"xytext": (5, 4), "ha": "left"}
        axes.annotate(row.method, (row.sent, row.loss), textcoords="offset points", fontsize=7, **aside)
    axes.set_xscale("log")
    axes.set_xlabel("bytes that one worker sends in a step")
    axes.set_ylabel("validation loss, nats a byte")
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("docs/distro.json"))
    parser.add_argument("--plots", type=Path, help="folder for the plots; none is drawn without it")
    arguments = parser.parse_args()
    for (size, steps), rows in rows_of(json.loads(arguments.results.read_text())).items():
        title = f"{size} weights, {steps:,} steps, 4 workers"
        print(f"\n{title}\n\n{table(rows)}")
        if arguments.plots:
            draw(title, rows, arguments.plots / f"distro-{size}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
