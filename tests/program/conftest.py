"""Fixtures of the program tests: one thread, and each family captured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from program_families import FAMILIES
from torch import nn

from distensor.program import Captured, capture


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def captured_family(name: str) -> tuple[nn.Module, Captured]:
    family = FAMILIES[name]
    module = family.build()
    return module, capture(module, family.batch(*family.sizes[0]), loss=family.loss)


@pytest.fixture(scope="session")
def captured() -> Callable[[str], tuple[Any, Captured]]:
    return captured_family
