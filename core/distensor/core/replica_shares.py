"""How state that each of several replicas has for itself becomes that of another number of replicas. Pure."""

from __future__ import annotations

from distensor.core.errors import ConfigError


def replica_shares(replica: int, *, of: int, saved: int) -> dict[int, float]:
    """What `replica` of `of` takes of each of `saved` replicas: numbers that add up to one, by saved replica.

    Both line up along the same length and each takes what it overlaps. So the same number of replicas takes each its
    own; of twice as many two take the same; half as many take the mean of two. The mean over the new replicas is always
    the mean over the saved ones: no residual that was still to be sent is lost or counted twice.

    Raises:
        ConfigError: numbers that are none of replicas.
    """
    if not 0 <= replica < of or saved < 1:
        raise ConfigError(f"replica {replica} of {of}, from {saved}: expected a replica of at least one, from one")
    # In units of 1 / (of * saved): the replica covers [replica * saved, (replica + 1) * saved).
    start, end = replica * saved, (replica + 1) * saved
    found: dict[int, float] = {}
    for other in range(start // of, -(-end // of)):
        overlap = min(end, (other + 1) * of) - max(start, other * of)
        found[other] = overlap / saved
    return found
