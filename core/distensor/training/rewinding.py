"""Going on from a checkpoint in the middle of a `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from distensor.core.errors import StateLostError

if TYPE_CHECKING:
    from distensor.training.checkpointing import Feed
    from distensor.training.results import StepResult


def resuming(
    steps: Callable[[Feed], Iterator[StepResult]], feed: Feed, rewound: Callable[[StateLostError], Feed]
) -> Iterator[StepResult]:
    """The results of `steps(feed)`; where the state is lost, those of the steps from the feed that `rewound` gives."""
    while True:
        try:
            yield from steps(feed)
        except StateLostError as error:
            feed = rewound(error)
        else:
            return
