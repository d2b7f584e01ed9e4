"""The dashboard stands alone, and the commands that print do not pay for Textual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import distensor_tui

PACKAGE = Path(distensor_tui.__file__).parent
FOREIGN = ("distensor", "distensor_server", "torch", "grpc", "psutil", "numpy", "google")


def loaded(code: str) -> set[str]:
    """The names of all modules after running the code in a fresh interpreter."""
    program = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(found.stdout.split())


def everything() -> str:
    names = sorted(path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = [".".join(name.parts) for name in names if name.name != "__main__"]
    return "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)


def test_no_module_needs_anything_of_ours_or_anything_heavy() -> None:
    modules = loaded(everything())
    assert "distensor_tui.app" in modules
    assert not [name for name in FOREIGN if name in modules]


@pytest.mark.parametrize("module", ["cli", "once", "plain", "arguments", "tty"])
def test_printing_commands_do_without_textual_rich_and_asyncio(module: str) -> None:
    modules = loaded(f"import distensor_tui.{module}")
    assert not {"textual", "rich", "asyncio"} & modules
