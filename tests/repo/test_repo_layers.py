"""The import contracts: complete, and each of them catches a planted import."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import repo_rules as rules

Run = Callable[..., "CompletedProcess[str]"]
PACKAGES = ("distensor", "distensor_server", "distensor_tui")
SUPERVISOR_KNOWS = {"comm", "core"}

# contract id -> (file in the copied tree, line planted there)
PLANTS = {
    "layers": ("distensor/core/planted.py", "import distensor.training"),
    "hub-off-the-path": ("distensor/node/planted.py", "import distensor.hub"),
    "service": ("distensor/hub/planted.py", "import distensor.program"),
    "torch-free": ("distensor/comm/planted.py", "def later():\n    import torch"),
    "probe-protected": ("distensor_server/devices/planted.py", "import distensor_server.devices.probe"),
    "group-helpers-protected": ("distensor/sync/planted_too.py", "import distensor.core.distributed"),
    "dashboard-alone": ("distensor_tui/planted.py", "import distensor.core"),
    "supervisor": ("distensor_server/planted.py", "import distensor.transport"),
    "core-alone": ("distensor/training/planted.py", "import distensor_server"),
    "proto-protected": ("distensor/sync/planted.py", "import distensor.proto"),
    "testing-protected": ("distensor/optim/planted.py", "import distensor.testing"),
    "acyclic": (
        "distensor/program/planted.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import distensor.program.planted_too",
    ),
}


def contracts() -> dict[str, dict[str, Any]]:
    linter = tomllib.loads((rules.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract for contract in linter["contracts"]}


def subpackages() -> set[str]:
    return {path.parent.name for path in (rules.ROOT / "core/distensor").glob("*/__init__.py")}


def test_every_contract_has_a_plant() -> None:
    assert set(PLANTS) == set(contracts())


def test_the_supervisor_may_know_only_comm_and_core() -> None:
    forbidden = {name.partition(".")[2] for name in contracts()["supervisor"]["forbidden_modules"]}
    assert forbidden == subpackages() - SUPERVISOR_KNOWS


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("planted")
    for package in PACKAGES:
        source = rules.ROOT / ("core/distensor" if package == "distensor" else package)
        shutil.copytree(source, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(rules.ROOT / "pyproject.toml", tree)
    for file, line in PLANTS.values():
        (tree / file).write_text(f"{line}\n")
    (tree / "distensor/program/planted_too.py").write_text("import distensor.program.planted\n")
    return tree


def test_each_contract_catches_its_plant(run: Run, planted: Path) -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    env = os.environ | {"PYTHONPATH": str(planted), "COLUMNS": "200"}
    done = run([linter, "--no-cache"], cwd=planted, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    said = {line.partition(" BROKEN")[0] for line in done.stdout.splitlines() if " BROKEN" in line}
    assert said == {contract["name"] for contract in contracts().values()}
