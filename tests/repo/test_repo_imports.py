"""What importing each package loads, in fresh interpreters.

The static import graph does not see that importing `distensor.core` runs `distensor/__init__`, nor what a
library loads by itself. CI runs this file again, alone, against the installed wheels: it needs only pytest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ARRAYS = ("torch", "mlx", "numpy", "transformers")
ALLOWED_MS = 50.0

# module -> what must not be loaded by importing it
FORBIDDEN = {
    "distensor": (*ARRAYS, "grpc", "google.protobuf", "cryptography", "asyncio"),
    "distensor.core": (*ARRAYS, "grpc", "google.protobuf", "cryptography"),
    "distensor.proto": ARRAYS,
    "distensor.comm": ARRAYS,
    "distensor.hub": ARRAYS,
    "distensor.hub.cli": ARRAYS,
    "distensor.cloud": ARRAYS,
    "distensor.cloud.cli": (*ARRAYS, "fastapi", "uvicorn"),
    "distensor.relay": ARRAYS,
    "distensor.relay.cli": ARRAYS,
    "distensor_server": ARRAYS,
    "distensor_server.cli": ARRAYS,
    "distensor_tui": (*ARRAYS, "grpc", "distensor", "distensor_server"),
    "distensor_tui.cli": (*ARRAYS, "grpc", "distensor", "distensor_server"),
}


def fresh(code: str) -> str:
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(module: str) -> set[str]:
    return set(json.loads(fresh(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))")))


@pytest.mark.parametrize("module", FORBIDDEN)
def test_import_loads_nothing_that_its_layer_forbids(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert [name for name in FORBIDDEN[module] if name in loaded] == []


def test_the_check_sees_what_a_module_loads() -> None:
    assert "decimal" in loaded_by("fractions")


def test_import_distensor_is_cheap() -> None:
    """Under 50 ms of CPU more than a bare interpreter: a busy machine makes wall time longer, CPU time hardly."""
    code = "from time import process_time as t; start = t(); import distensor; print(t() - start)"
    cost = statistics.median(float(fresh(code)) * 1000 for _ in range(7))
    print(f"import distensor: {cost:.1f} ms")
    assert cost < ALLOWED_MS


@pytest.mark.parametrize("package", ["distensor", "distensor_server", "distensor_tui"])
def test_what_is_imported_is_what_should_be_tested(package: str) -> None:
    """In CI's second run the installed wheel, otherwise the source tree that this file lies in."""
    where = Path(fresh(f"import {package}; print({package}.__file__)").strip()).resolve()
    expected = Path(sys.prefix) if "DISTENSOR_INSTALLED" in os.environ else Path(__file__).parents[2]
    assert where.is_relative_to(expected.resolve())
