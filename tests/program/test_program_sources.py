"""The package never runs code that came as data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import distensor.program

FILES = sorted(Path(distensor.program.__path__[0]).glob("*.py"))
FORBIDDEN = {"eval", "exec", "compile", "__import__", "pickle", "sympify", "parse_expr", "marshal", "dill"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch.export", "load"), ("torch.jit", "load"), ("export", "load")}


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name.split(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_file_evaluates_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not FORBIDDEN & set(_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert (ast.unparse(node.value), node.attr) not in FORBIDDEN_ATTRIBUTES


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem in {"kernels", "calls", "encoding", "reading", "arguments", "tape"}]
)
def test_no_operation_is_looked_up_by_name(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "getattr"]


def test_files_stay_readable() -> None:
    assert all(len(path.read_text().splitlines()) < 500 for path in FILES)
