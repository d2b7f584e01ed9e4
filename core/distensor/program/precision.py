"""Mixed precision as a rewrite of the graph: parameters stay float32, products run in bfloat16.

The rule is that of `torch.autocast("cpu", dtype=torch.bfloat16)` of torch 2.13, on every device: what a mesh computes
must not depend on which devices it is made of, and CUDA's own list is another one. Source of the lists:
aten/src/ATen/autocast_mode.cpp and autocast_mode.h of PyTorch; a test holds them against the running torch.

- products, convolutions and attention: operands become bfloat16;
- losses and a few others: operands become float32;
- joins (cat, stack): operands become the widest type among them;
- everything else: as its operands are, by torch's own promotion.

Integers, booleans, complex numbers and float64 are never cast. The result types were found by torch itself, since
capture traces under autocast; casts are what the traced graph does not show.
"""

from __future__ import annotations

from collections.abc import Sequence

from distensor.core.errors import CaptureError, ProgramRejectedError
from distensor.program.shapes import computed_dtypes
from distensor.program.values import DType, ProgramData

LOWERED = frozenset(
    {
        "aten.linear.default",
        "aten.matmul.default",
        "aten.mm.default",
        "aten.bmm.default",
        "aten.addmm.default",
        "aten.baddbmm.default",
        "aten.conv1d.default",
        "aten.conv1d.padding",
        "aten.conv2d.default",
        "aten.conv2d.padding",
        "aten.conv3d.default",
        "aten.conv_transpose1d.default",
        "aten.conv_transpose2d.input",
        "aten.prelu.default",
        "aten.scaled_dot_product_attention.default",
    }
)
RAISED = frozenset(
    {
        "aten.prod.default",
        "aten.prod.dim_int",
        "aten.polar.default",
        "aten.view_as_complex.default",
        "aten.cross_entropy_loss.default",
        "aten.nll_loss.default",
        "aten.mse_loss.default",
        "aten.l1_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.huber_loss.default",
        "aten.binary_cross_entropy.default",
        "aten.binary_cross_entropy_with_logits.default",
        "aten.kl_div.default",
        "aten.soft_margin_loss.default",
        "aten.cosine_embedding_loss.default",
        "aten.margin_ranking_loss.default",
        "aten.hinge_embedding_loss.default",
        "aten.triplet_margin_loss.default",
    }
)
WIDENED = frozenset({"aten.cat.default", "aten.stack.default"})
COMPOSED = frozenset({"aten.nll_loss_nd.default"})
"""In no list of torch's, but made of nothing else than an operation whose operands become float32."""

_ELIGIBLE = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def operand_dtype(op: str, operands: Sequence[DType]) -> DType | None:
    """What the eligible operands of `op` are cast to under autocast; None leaves them as they are."""
    if op in LOWERED:
        return DType.BFLOAT16
    if op in RAISED or op in COMPOSED:
        return DType.FLOAT32
    if op in WIDENED:
        return DType.FLOAT32 if DType.FLOAT32 in operands else DType.BFLOAT16
    return None


def is_eligible(dtype: DType) -> bool:
    """Whether autocast touches tensors of this type."""
    return dtype in _ELIGIBLE


def check_traced_dtypes(program: ProgramData, traced: dict[str, DType]) -> None:
    """Every operation must give, with the casts of this module, the type that torch gave it while tracing.

    Raises:
        CaptureError: an operation that autocast treats in a way that is not known here.
    """
    try:
        computed = computed_dtypes(program)
    except ProgramRejectedError as error:
        raise CaptureError(f"under autocast: {error}") from error
    for node in program.nodes:
        for name in node.out:
            if name is not None and computed[name] is not traced[name]:
                raise CaptureError(
                    f"{node.op} in module {node.module!r} gives {traced[name]} under autocast and "
                    f"{computed[name]} in a stage program; write its types out with .to(dtype), or train in fp32"
                )
