"""The house rules hold everywhere, and each checker catches a planted offence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import repo_rules as rules

import distensor

MOST_LINES = 500
LONG_FILES: dict[str, str] = {}  # path -> why it stays in one piece
CLOCK_ADAPTERS = {"core/distensor/core/clock.py", "distensor_tui/clock.py"}
FEWEST_WORDS = 3
LAZY_NAMES = re.compile("|".join(rf"distensor\.{name}" for name in distensor.__all__ if name != "__version__"))


def offences(check: object, *, spare: frozenset[str] | set[str] = frozenset()) -> list[str]:
    assert callable(check)
    return [
        f"{name}:{found.line}: {found.what}"
        for path in rules.production_files()
        if (name := str(path.relative_to(rules.ROOT))) not in spare
        for found in check(path.read_text())
    ]


def test_there_is_something_to_check() -> None:
    seen = {path.relative_to(rules.ROOT).parts[0] for path in rules.production_files()}
    assert seen == set(rules.PRODUCTION)


def test_nothing_runs_bytes_of_another_machine() -> None:
    assert offences(lambda source: rules.uses(source, rules.RUNS_FOREIGN_BYTES)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads as read\nread(b'')",
        "import pickle\nload = pickle.Unpickler",
        "import torch\ntorch.load('x')",
        "from torch import load\nload('x')",
        "import torch.export as te\nte.load('x')",
        "def later():\n    import torch.distributed as dist\n    dist.broadcast_object_list([])",
        "import numpy as np\nnp.load('x')",
        "eval('1')",
        "exec('1')",
    ],
)
def test_the_checker_finds_what_runs_foreign_bytes(planted: str) -> None:
    assert list(rules.uses(planted, rules.RUNS_FOREIGN_BYTES))


@pytest.mark.parametrize("harmless", ["model.eval()", "import json\njson.load(x)", "pool.exec(x)", "load"])
def test_the_checker_lets_harmless_names_be(harmless: str) -> None:
    assert not list(rules.uses(harmless, rules.RUNS_FOREIGN_BYTES))


def test_only_the_adapters_read_the_clock() -> None:
    assert offences(lambda source: rules.uses(source, rules.READS_THE_CLOCK), spare=CLOCK_ADAPTERS) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import time\ntime.time()",
        "from time import sleep\nsleep(1)",
        "import time as t\nt.time_ns",
        "from datetime import datetime\ndatetime.now()",
        "import datetime as dt\ndt.datetime.utcnow()",
        "from datetime import date\ndate.today()",
    ],
)
def test_the_checker_finds_clocks(planted: str) -> None:
    assert list(rules.uses(planted, rules.READS_THE_CLOCK))
    assert not list(rules.uses("import time\ntime.monotonic()", rules.READS_THE_CLOCK))


def test_packages_ask_the_root_only_for_its_version() -> None:
    """The names it resolves for users would drag every layer into any other (`make layers` looks away here)."""
    users = {f"core/distensor/demo/{path.name}" for path in (rules.ROOT / "core/distensor/demo").glob("*.py")}
    assert offences(lambda source: rules.uses(source, LAZY_NAMES), spare=users) == []


@pytest.mark.parametrize("planted", ["import distensor as ds\nds.Trainer()", "from distensor import init\ninit()"])
def test_the_checker_finds_uses_of_the_root(planted: str) -> None:
    assert list(rules.uses(planted, LAZY_NAMES))
    assert not list(rules.uses("from distensor import __version__\n__version__", LAZY_NAMES))


def test_every_broad_except_has_its_reason() -> None:
    def without_reason(source: str) -> list[rules.Finding]:
        return [found for found in rules.broad_excepts(source) if len(found.what.split()) < FEWEST_WORDS]

    assert offences(without_reason) == []


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ("except Exception:", ""),
        ("except:", ""),
        ("except (ValueError, BaseException):  # noqa: BLE001", ""),
        ("except Exception as e:  # noqa: BLE001, S110 - a probe may fail", "a probe may fail"),
        ("except Exception:  # a probe may fail", "a probe may fail"),
    ],
)
def test_the_checker_reads_the_reason_of_a_broad_except(planted: str, reason: str) -> None:
    source = f"try:\n    pass\n{planted}\n    pass\n"
    assert [found.what for found in rules.broad_excepts(source)] == [reason]
    assert not list(rules.broad_excepts(source.replace(planted, "except ValueError:")))


def test_every_ruff_ignore_has_its_reason() -> None:
    def without_reason(source: str) -> list[rules.Finding]:
        return [found for found in rules.ruff_ignores(source) if not found.what]

    assert offences(without_reason) == []


def test_long_files_are_listed_with_a_reason() -> None:
    roots = (*rules.PRODUCTION, "tests", "benchmarks", "examples", "distributions")
    paths: list[Path] = [path for root in roots for path in rules.python_files(root)]
    long = {str(path.relative_to(rules.ROOT)) for path in paths if len(path.read_text().splitlines()) > MOST_LINES}
    assert long == set(LONG_FILES)


def test_functions_stay_short() -> None:
    assert rules.median_function_length() <= 9
