"""Optimizers that exchange a few bytes a step instead of all gradients (the DisTrO family).

Drop-ins for AdamW in a script over torch.distributed: no all-reduce of gradients, each worker calls `step` on its own.
"""

from __future__ import annotations

from distensor.optim.distro.adamw import DisTrOAdamW
from distensor.optim.distro.demo import DeMo, DisTrO
from distensor.optim.distro.exchange import Exchange
from distensor.optim.distro.local import DiLoCo, SparseLoCo

__all__ = ["DisTrOAdamW", "DeMo", "DisTrO", "DiLoCo", "SparseLoCo", "Exchange"]
