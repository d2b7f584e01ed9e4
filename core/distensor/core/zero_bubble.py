"""Zero-bubble orders, each for one rank: weight gradients fill the time in which a rank would wait.

A backward is two actions: I gives the gradient of the stage's input, which the previous stage waits for; W gives the
gradients of the weights, which nobody waits for before the update.

Source: Qi et al. 2023, arXiv:2401.10241 (ZB-H1, here also over virtual stages) and Qi et al. 2024, arXiv:2405.15362
(ZB-V: two stages a rank, placed as a V, so that the last stage lives beside the first).
"""

from __future__ import annotations

from collections.abc import Iterator

from distensor.core.actions import Action, forward, input_gradient, weight_gradient
from distensor.core.schedule_orders import chunk_places, group_sizes


def zero_bubble(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-H1: as 1F1B, and `rank` weight gradients late, so that every rank holds as much as 1F1B's first."""
    chunks = stages // ranks
    places = list(chunk_places(chunks, ranks, micro_batches))
    warm_up = min((chunks - 1) * group_sizes(ranks, micro_batches)[0] + ranks - 1 - rank, len(places))
    forwards = [forward(chunk * ranks + rank, micro) for chunk, micro in places]
    backwards = [((chunks - 1 - chunk) * ranks + rank, micro) for chunk, micro in places]
    actions = forwards[:warm_up]
    for index, (stage, micro) in enumerate(backwards):
        actions += forwards[warm_up + index : warm_up + index + 1]
        actions.append(input_gradient(stage, micro))
        if index >= rank:
            actions.append(weight_gradient(*backwards[index - rank]))
    late = backwards[max(0, len(backwards) - rank) :]
    return (*actions, *(weight_gradient(*place) for place in late))


def zero_bubble_v(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-V: rank r holds the stages r and 2P-1-r; at most 2P forwards of one stage are in flight on every rank."""
    # The order is defined from 2P-1 micro-batches on; with fewer, it is the same without those that are not there.
    full = _v_order(rank, ranks, max(2 * ranks - 1, micro_batches))
    return tuple(action for action in full if action.micro_batch < micro_batches)


def _v_order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    forward_down, forward_up = iter(range(micro_batches)), iter(range(micro_batches))
    actions = [forward(down, next(forward_down)) for _ in range(2 * (ranks - rank) - 1)]
    for _ in range(rank):
        actions += [forward(up, next(forward_up)), forward(down, next(forward_down))]
    done_up = ranks - rank
    for micro in range(done_up):
        actions += [forward(up, next(forward_up)), input_gradient(up, micro), weight_gradient(up, micro)]
    done_down = 0
    for micro in forward_up:
        actions += [forward(down, each) for each in _at_most_one(forward_down)]
        actions += [input_gradient(down, done_down), weight_gradient(down, done_down)]
        actions += [forward(up, micro), input_gradient(up, done_up), weight_gradient(up, done_up)]
        done_down, done_up = done_down + 1, done_up + 1
    return actions + _v_cool_down(rank, ranks, micro_batches, done_down, done_up)


def _v_cool_down(rank: int, ranks: int, micro_batches: int, done_down: int, done_up: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    actions: list[Action] = []
    for step in range(rank):
        actions += [input_gradient(down, done_down + step), input_gradient(up, done_up + step)]
    for step in range(ranks - rank):
        actions += [input_gradient(down, done_down + rank + step), weight_gradient(down, done_down + step)]
    actions += [weight_gradient(up, micro) for micro in range(done_up, micro_batches)]
    return actions + [weight_gradient(down, micro) for micro in range(done_down + ranks - rank, micro_batches)]


def _at_most_one(numbers: Iterator[int]) -> list[int]:
    return [number for number in (next(numbers, None),) if number is not None]
