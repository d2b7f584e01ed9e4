"""Requests that are sent again because their answer was lost: the same key, the same answer.

Answers are kept in memory, because one of them holds a key's text, which the books never do. So they are forgotten with
the process, and after a day; what must hold for ever has a key of its own in the ledger.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.responses import Response

from distensor.cloud.problems import Refusal

KEPT_SECONDS = 86_400.0
MOST_KEPT = 10_000

Name: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    asked: str
    since: float
    answer: asyncio.Task[Response]


class Repeats:
    """The newest answers to requests with a key, used in one event loop."""

    def __init__(self, most: int = MOST_KEPT, seconds: float = KEPT_SECONDS) -> None:
        self._kept: OrderedDict[Name, _Kept] = OrderedDict()
        self._most = most
        self._seconds = seconds

    async def once(self, name: Name, asked: str, run: Callable[[], Awaitable[Response]], now: float) -> Response:
        """The answer of `run`, which is run once for each name; one that raised is run again the next time.

        Raises:
            Refusal: the name was used for something else.
        """
        self._forget(now)
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = _Kept(asked, now, asyncio.ensure_future(_running(run)))
            kept.answer.add_done_callback(lambda task: self._drop_failed(name, task))
        elif kept.asked != asked:
            raise Refusal(409, "this Idempotency-Key was used for another request; take a new one")
        return _copy(await asyncio.shield(kept.answer))

    def _drop_failed(self, name: Name, task: asyncio.Task[Response]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._kept.pop(name, None)

    def _forget(self, now: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if len(self._kept) < self._most and now - oldest.since < self._seconds:
                return
            self._kept.popitem(last=False)


async def _running(run: Callable[[], Awaitable[Response]]) -> Response:
    return await run()


def _copy(answer: Response) -> Response:
    """A response is sent once; the same bytes again are another one."""
    fresh = Response(bytes(answer.body), answer.status_code)
    fresh.raw_headers = list(answer.raw_headers)
    return fresh
