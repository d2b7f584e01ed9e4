"""Optimizers that exchange a few bytes a step instead of all gradients (the DisTrO family)."""
