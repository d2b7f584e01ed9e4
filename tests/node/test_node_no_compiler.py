"""A worker does without torch's compiler, and whoever needs it gets it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from distensor.node.no_compiler import put_off_the_compiler

put_off_the_compiler()
put_off_the_compiler()
stand_in = sys.modules["torch._dynamo"]

linear = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
before = linear.weight.detach().clone()
linear(torch.ones(1, 3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert not torch.equal(before, linear.weight)
meta = torch.ops.aten.add.Tensor(torch.empty(2, 3, device="meta"), torch.empty(3, device="meta", dtype=torch.float64))
assert (meta.shape, meta.dtype) == ((2, 3), torch.float64)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
assert torch.compiler.disable(len, reason="tried") is len
assert torch.compiler.disable(recursive=False)(len) is len
assert sys.modules["torch._dynamo"] is torch._dynamo is stand_in
assert "torch._dynamo.symbolic_convert" not in sys.modules

import torch._dynamo.config  # what the stand-in has not loads the compiler in its place

assert sys.modules["torch._dynamo"] is torch._dynamo is not stand_in
assert torch._dynamo.config.cache_size_limit > 0
calls = []
backend = lambda graph, inputs: calls.append(graph) or graph.forward
assert torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.zeros(2)).tolist() == [1.0, 1.0]
assert len(calls) == 1, "it was compiled"
assert stand_in.list_backends is torch._dynamo.list_backends, "who kept the stand-in reaches the compiler through it"
"""


def test_eager_work_loads_no_compiler_and_asking_for_it_does(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = python("-c", SCRIPT, timeout=120)
    assert done.returncode == 0, done.stderr
