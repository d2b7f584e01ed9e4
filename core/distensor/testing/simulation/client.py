"""A trainer's calls to the hub, as `comm.client.HubClient` makes them, in the simulation's time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc.aio

from distensor.comm import codec
from distensor.comm.backoff import Backoff
from distensor.comm.channels import EOF, bearer
from distensor.comm.failures import error_of_status
from distensor.core.control import JobUpdate
from distensor.core.errors import HubUnreachableError
from distensor.core.ids import JobId
from distensor.testing.simulation.network import ADDRESS, Network

CALL_SECONDS = 10.0


class TrainerClient:
    """Of one trainer."""

    def __init__(self, network: Network, party: str, secret: str, dice: random.Random) -> None:
        self._network = network
        self._party = party
        self._metadata = bearer("trainer", secret)
        self._dice = dice

    async def call(self, method: str, request: Any) -> Any:
        """Raises: HubUnreachableError: no answer within ten seconds, however often it was sent; else what it says."""
        backoff = Backoff(uniform=self._dice.random)
        deadline = self._network.time() + CALL_SECONDS
        while True:
            left = deadline - self._network.time()
            try:
                return await self._network.call(self._party, method, request, self._metadata, max(0.05, left))
            except HubUnreachableError:
                delay = backoff.next_delay()
                if self._network.time() + delay >= deadline:
                    raise
                await asyncio.sleep(delay)

    async def watch(self, job_id: JobId, told: Callable[[JobUpdate], None]) -> None:
        """Tell the job's state and every change until it has ended; connects again by itself."""
        backoff = Backoff(uniform=self._dice.random)
        while True:
            with suppress(HubUnreachableError):
                if await self._watch_once(job_id, told, backoff):
                    return
            await asyncio.sleep(backoff.next_delay())

    async def _watch_once(self, job_id: JobId, told: Callable[[JobUpdate], None], backoff: Backoff) -> bool:
        async def serve(servicer: Any, context: Any) -> None:
            async for update in servicer.WatchJob(codec.write_watch(job_id), context):
                await context.write(update)

        connection = await self._network.connect(self._party, self._metadata, serve)
        try:
            while True:
                try:
                    message = await connection.read()
                except grpc.aio.AioRpcError as error:
                    raise error_of_status(error.code(), error.details() or "", ADDRESS) from error
                if message is EOF:
                    return False
                update = codec.read_update(message)
                backoff.reset()
                told(update)
                if update.state.ended:
                    return True
        finally:
            connection.cancel()
