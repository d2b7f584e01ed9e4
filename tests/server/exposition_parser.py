"""A strict reader of Prometheus text (format 0.0.4) that refuses what promtool would complain about."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (\S+)")
UNITS = ("seconds", "bytes", "celsius", "watts", "ratio")


@dataclass
class Metric:
    name: str
    kind: str
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)


def parse(page: str) -> dict[str, Metric]:
    """All metrics of `page`; AssertionError with the line that is wrong."""
    assert page == "" or page.endswith("\n"), "the last line needs its end"
    metrics: dict[str, Metric] = {}
    helped = ""
    for line in page.splitlines():
        if line.startswith("# HELP "):
            helped, text = line[len("# HELP ") :].split(" ", 1)
            assert text.strip(), line
            assert helped not in metrics, f"twice: {line}"
        elif line.startswith("# TYPE "):
            name, kind = line[len("# TYPE ") :].split(" ")
            assert name == helped, f"TYPE without its HELP: {line}"
            assert kind in ("gauge", "counter"), line
            assert (kind == "counter") == name.endswith("_total"), line
            metrics[name] = Metric(name, kind)
        else:
            _sample(line, metrics, helped)
    assert all(metric.samples for metric in metrics.values()), "a metric without samples"
    return metrics


def _sample(line: str, metrics: dict[str, Metric], present: str) -> None:
    found = SAMPLE.fullmatch(line)
    assert found, f"not a sample: {line!r}"
    name, labels, value = found[1], found[2] or "", found[found.lastindex or 0]
    assert name == present, f"outside its group: {line}"
    pairs = tuple((label, _unescaped(text)) for label, text in re.findall(LABEL, labels))
    assert len({label for label, _ in pairs}) == len(pairs), f"a label twice: {line}"
    assert pairs not in metrics[name].samples, f"the same sample twice: {line}"
    metrics[name].samples[pairs] = float(value)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)
