"""Collectives of another axis, met when a graph is rewritten a second time."""

from __future__ import annotations

from collections.abc import Mapping

from distensor.program.partitioning.rewriter import Rewriter
from distensor.program.partitioning.rules.base import Rule


def element_by_element(rewriter: Rewriter) -> None:
    shard = rewriter.shard(rewriter.argument("self"))
    rewriter.keep(rewriter.node.args, shard)


def of_a_dim(rewriter: Rewriter) -> None:
    """gather, split and scatter of one dim leave the others cut."""
    shard = rewriter.shard(rewriter.argument("self"))
    if shard is None or shard.dim == rewriter.argument("dim"):
        rewriter.passed_on()
    else:
        rewriter.keep(rewriter.node.args, shard)


RULES: Mapping[str, Rule] = {
    "dist.enter.default": element_by_element,
    "dist.reduce.default": element_by_element,
    "dist.maximum.default": element_by_element,
    "dist.once.default": element_by_element,
    "dist.gather.default": of_a_dim,
    "dist.split.default": of_a_dim,
    "dist.scatter.default": of_a_dim,
}
