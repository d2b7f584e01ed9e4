"""A fresh interpreter: comm and hub are light, and torch is in neither."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "mlx", "numpy", "transformers"]


@pytest.mark.parametrize(
    "module",
    ["distensor.comm", "distensor.hub", "distensor.hub.cli", "distensor.hub.app", "distensor.testing.hub_store"],
)
def test_nothing_heavy_is_loaded(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == []
