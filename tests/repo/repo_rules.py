"""The house rules that no linter has, as functions from source text to findings (line, what)."""

from __future__ import annotations

import ast
import re
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCTION = ("core", "distensor_server", "distensor_tui")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")

# Whatever reads bytes and may run what they say (decision 2 of docs/architecture.md).
RUNS_FOREIGN_BYTES = re.compile(
    r"""(_?pickle|cloudpickle|dill|marshal|shelve|joblib)\..*
    | torch\.(load|export\.load|jit\.load|package\..*|hub\..*)
    | torch\.distributed\.(broadcast|all_gather|gather|scatter|send|recv)_object(_list)?
    | torch\.distributed\.rpc\..*
    | numpy\.load | sympy\.sympify | yaml\.(load|unsafe_load|full_load)
    | (builtins\.)?(eval|exec)""",
    re.VERBOSE,
)
READS_THE_CLOCK = re.compile(
    r"time\.(time|time_ns|sleep) | datetime\.(datetime\.(now|utcnow|today)|date\.today)", re.VERBOSE
)
BROAD = {"Exception", "BaseException"}
NO_REASON = re.compile(r"noqa(:\s*[A-Z]+[0-9]+(\s*,\s*[A-Z]+[0-9]+)*)?|type:\s*ignore(\[[^]]*\])?|pragma:.*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    line: int
    what: str


def production_files() -> list[Path]:
    return [path for root in PRODUCTION for path in python_files(root)]


def python_files(root: str) -> list[Path]:
    return [path for path in sorted((ROOT / root).rglob("*.py")) if not GENERATED.search(path.name)]


def _imported_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> dotted name, from every import in the file, however deep."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return names


def _dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, imported)
        return None if base is None else f"{base}.{node.attr}"
    return None


def uses(source: str, banned: re.Pattern[str]) -> Iterator[Finding]:
    """Where a banned dotted name is mentioned, called or not, also under another local name."""
    tree = ast.parse(source)
    imported = _imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, imported)
            if name is not None and banned.fullmatch(name):
                yield Finding(line=node.lineno, what=name)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in BROAD for kind in caught)


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def broad_excepts(source: str) -> Iterator[Finding]:
    """Every broad `except`; `what` is the reason beside it, empty when there is none."""
    comments = _comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node):
            reason = NO_REASON.sub("", comments.get(node.lineno, "")).strip("# -:")
            yield Finding(line=node.lineno, what=reason)


def ruff_ignores(source: str) -> Iterator[Finding]:
    """Every noqa; `what` is the reason in the same comment, empty when there is none."""
    for line, comment in _comments(source).items():
        if "noqa" in comment:
            yield Finding(line=line, what=NO_REASON.sub("", comment).strip("# -:"))


def function_lengths(source: str) -> list[int]:
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def median_function_length() -> float:
    return statistics.median(n for path in production_files() for n in function_lengths(path.read_text()))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)
