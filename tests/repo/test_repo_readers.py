"""Nobody who takes foreign bytes apart is forgotten by the fuzzer."""

from __future__ import annotations

import ast

from foreign_readers import OUTSIDE, TRIED, names_in, readers


def test_every_reader_of_foreign_bytes_is_tried_or_has_a_reason_not_to_be() -> None:
    """A new one: add it to a registry of tests/fuzz and to TRIED, or to OUTSIDE with the reason."""
    found, tried = set(readers()), set(TRIED)
    assert sorted(found - tried - OUTSIDE.keys()) == []
    assert sorted(OUTSIDE.keys() - found) == [], "there is no such function any more"
    assert sorted(OUTSIDE.keys() & tried) == []


def test_the_scan_finds_planted_readers() -> None:
    planted = """
def decode(x): ...
class Book:
    def from_json(x): ...
    def _read(x): ...
async def read_page(x): ...
def ready(x): ...
"""
    assert list(names_in(ast.parse(planted).body)) == ["decode", "Book.from_json", "read_page"]
