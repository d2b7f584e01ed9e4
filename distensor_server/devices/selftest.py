"""Does a device compute what the CPU computes? Operations of a transformer, forward and backward, in several layouts.

Backends have shipped kernels whose gradients were silently wrong for inputs that are not contiguous (pytorch issue
175188, MPS): a worker on such a device would spoil the gradient of everybody. Runs in the probe child only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows
from torch import Tensor

Operation: TypeAlias = Callable[[Tensor], Tensor]

SHAPE = (6, 8, 10)
RELATIVE = 2e-3
"""Of the greatest value: float32 sums in another order differ by 1e-6, and TF32 products by 1e-3."""
SEED = 20240229

LAYOUTS: Mapping[str, Operation] = {
    "contiguous": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "transposed": lambda x: x.transpose(-1, -2),
    "strided": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
}


def _weight(x: Tensor) -> Tensor:
    """A matrix that fits and is the same on every device."""
    size = x.shape[-1] * 7
    return torch.linspace(-1, 1, size, dtype=torch.float32).reshape(x.shape[-1], 7).to(x.device)


OPERATIONS: Mapping[str, Operation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "matmul": lambda x: x @ _weight(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "product": lambda x: x * x.flip(0),
    "sum": lambda x: x.sum(dim=-2),
}


def faults(device: str, operations: Mapping[str, Operation] = OPERATIONS) -> list[str]:
    """What `device` computes otherwise than the CPU, each in words; empty when all is well.

    `operations` are those of the device; the CPU always runs `OPERATIONS`.
    """
    return [found for name in OPERATIONS for found in _check(name, operations[name], device)]


def _check(name: str, operation: Operation, device: str) -> Iterator[str]:
    for layout, arrange in LAYOUTS.items():
        expected = _run(OPERATIONS[name], arrange, "cpu")
        try:
            found = _run(operation, arrange, device)
        except torch.OutOfMemoryError:
            raise  # somebody else fills the device: that says nothing about its arithmetic
        except RuntimeError as error:
            yield f"{name}, {layout} input: {str(error).splitlines()[0][:200]}"
            continue
        for part, one, other in zip(("forward", "backward"), expected, found, strict=True):
            worst = _difference(one, other)
            if worst is not None:
                yield f"{name} {part}, {layout} input: {worst}"


def _run(operation: Operation, arrange: Operation, device: str) -> tuple[Tensor, Tensor]:
    """The result and the gradient of the input, on the CPU."""
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED))
    leaf = made.to(device).requires_grad_()
    result = operation(arrange(leaf))
    upstream = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(device)
    (gradient,) = torch.autograd.grad(result, leaf, upstream)
    return result.detach().cpu(), gradient.cpu()


def _difference(expected: Tensor, found: Tensor) -> str | None:
    scale = float(expected.abs().max())
    worst = float((expected - found).abs().max())
    # Written so that a difference which is not a number counts as one.
    if worst <= RELATIVE * max(scale, 1e-3):
        return None
    return f"differs from the CPU by {worst:.3g} where values reach {scale:.3g}"
