"""The gates of the running supervisor: looks every other second, and carries out what follows."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distensor.core.control import Assignment, DeviceInfo, DeviceKind
from distensor.core.reading import Reading, Unavailable
from distensor_server.config import Limits
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.gates.evaluate import evaluate
from distensor_server.gates.model import BEING_READ, NOT_WATCHED, Memory, Moment, Verdicts
from distensor_server.gates.readings import take_readings
from distensor_server.gates.settings import LimitsDesk
from distensor_server.gates.traffic import Traffic
from distensor_server.localserver import Method
from distensor_server.messages import pace_line
from distensor_server.node import Node
from distensor_server.owner import PAUSE_DRAIN_SECONDS
from distensor_server.picture import Gate, Picture
from distensor_server.policy.policy import GIB, Policy
from distensor_server.policy.windows import day_of
from distensor_server.policy.zones import local_zone, named_zone

IDLE_SECONDS = 5.0
METERED_EVERY = 6
"""The network changes less often than people come back: so many rounds of the idle probe."""
MB = 1e6


class Gates(Feature):
    """Closes and opens the gates, and keeps the traffic of workers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._traffic = Traffic(node.state.root / "traffic.json")
        self._idle: Reading[float] = NOT_WATCHED
        self._metered: Reading[bool] = NOT_WATCHED
        self._memory = Memory()
        self._verdicts = Verdicts(gates=(), duties={})
        self._desk = LimitsDesk(node, self._changed_by)

    @property
    def _policy(self) -> Policy:
        return self._node.limits.policy

    # The life

    def open(self) -> None:
        self._traffic.load(day_of(self._node.clock.now(), self._moment().zone))
        self._reset_probes()
        self._look(self._node.picture())

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._probe(),)

    async def _probe(self) -> None:
        """Children of the system answer slowly: they are asked beside the ticks, and only for gates with a limit."""
        surroundings, clock = self._node.surroundings, self._node.clock
        rounds = 0
        while True:
            if self._policy.only_when_idle:
                self._idle = await surroundings.idle_seconds(clock.now())
            if not self._policy.run_on_metered and rounds % METERED_EVERY == 0:
                self._metered = await surroundings.metered()
                rounds = 0
            rounds += 1
            await clock.sleep_async(IDLE_SECONDS)

    def _reset_probes(self) -> None:
        """A gate that just got a limit waits for its first reading; one without has none."""
        self._idle = _watched(self._idle, self._policy.only_when_idle)
        self._metered = _watched(self._metered, not self._policy.run_on_metered)

    def close(self) -> None:
        self._node.journal.guarded(lambda: self._traffic.save(self._node.clock.monotonic(), at_once=True))

    # What happens

    def on_tick(self, picture: Picture) -> None:
        self._traffic.count(picture.workers, day_of(picture.now, self._moment().zone))
        self._node.journal.guarded(lambda: self._traffic.save(self._node.clock.monotonic()))
        self._look(picture)

    def on_limits(self, limits: Limits) -> None:
        self._reset_probes()
        self._look(self._node.picture())

    def on_clock_set(self, by: float) -> None:
        self._memory = self._memory.moved(by)

    def _moment(self) -> Moment:
        zone = self._policy.schedule_zone
        return Moment(
            wall=self._node.clock.now(),
            monotonic=self._node.clock.monotonic(),
            zone=named_zone(zone) if zone else local_zone(self._node.environment),
        )

    def _judge(self, picture: Picture, policy: Policy) -> tuple[Verdicts, Memory]:
        surroundings = self._node.surroundings
        readings = take_readings(
            picture,
            policy,
            self._traffic,
            idle=_watched(self._idle, policy.only_when_idle),
            metered=_watched(self._metered, not policy.run_on_metered),
            power=surroundings.power() if not policy.run_on_battery or policy.battery_min_percent else NOT_WATCHED,
            disk_free=surroundings.disk_free(self._node.state.root),
        )
        return evaluate(readings, policy, self._memory, self._moment())

    def _look(self, picture: Picture) -> None:
        before = self._verdicts
        self._verdicts, self._memory = self._judge(picture, self._policy)
        self._tell(before)
        self._end_gated()
        self._pace()
        self._node.reconsider()

    def _tell(self, before: Verdicts) -> None:
        was = {(gate.gate, gate.device): gate.state for gate in before.gates}
        for gate in self._verdicts.gates:
            old = was.get((gate.gate, gate.device), "open")
            if gate.state != old:
                severity, text = _news(gate, old)
                self._node.journal.add(severity, gate.device or "gates", text)

    def _end_gated(self) -> None:
        for worker in self._node.workforce.workers:
            gate = self._gate_of(worker.assignment.device_id)
            if gate is not None and worker.life.wanted:
                worker.drain(PAUSE_DRAIN_SECONDS, _reason(gate))

    def _gate_of(self, device_id: str) -> Gate | None:
        return self._verdicts.closed(None) or self._device_gate(device_id)

    def _device_gate(self, device_id: str) -> Gate | None:
        """A device that was found since the last look has its gates too."""
        known = device_id in self._verdicts.duties
        verdicts = self._verdicts if known else self._judge(self._node.picture(), self._policy)[0]
        return verdicts.closed(device_id)

    def _pace(self) -> None:
        """Tell each worker how much of its time it may work, and its share of the traffic."""
        alive = [worker for worker in self._node.workforce.workers if worker.life.alive]
        share = max(1, len(alive))
        send, receive = self._policy.upload_max_mb_s, self._policy.download_max_mb_s
        for worker in alive:
            worker.set_pace(
                pace_line(
                    duty=round(self._verdicts.duties.get(worker.assignment.device_id, 1.0), 3),
                    send_rate=send * MB / share or None,
                    receive_rate=receive * MB / share or None,
                )
            )

    # What others ask

    def refusal(self, assignment: Assignment | None) -> str | None:
        gate = self._verdicts.blocked if assignment is None else self._gate_of(assignment.device_id)
        return None if gate is None else _reason(gate)

    def gates(self) -> Sequence[Gate]:
        return self._verdicts.gates

    def offer(self, info: DeviceInfo) -> DeviceInfo:
        """A closed gate leaves no slot; what is reserved for the owner is not offered."""
        gate = None if info.unusable else self._device_gate(info.device_id)
        if gate is not None:
            return replace(info, slots=0, unusable=_reason(gate))
        if info.kind is DeviceKind.CPU:
            reserve = self._policy.ram_reserve_gib
        else:
            reserve = self._policy.of_device(info.device_id).vram_reserve_gib
        return _less(info, int(reserve * GIB)) if reserve else info

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"limits": lambda _picture: self._desk.section(), "usage": self._usage}

    def _usage(self, _picture: Picture) -> Mapping[str, Any]:
        """What changes all the time, apart from the settings, which are long and seldom change."""
        return {
            "duty": {device: round(factor, 3) for device, factor in self._verdicts.duties.items()},
            "bytes_day": self._traffic.day,
            "bytes_month": self._traffic.month,
        }

    def methods(self) -> Mapping[str, Method]:
        return self._desk.methods()

    def _changed_by(self, limits: Limits) -> tuple[Gate, ...]:
        """The gates that with other limits would be closed, or open for want of a reading, and are not now."""
        picture = self._node.picture()
        verdicts, _ = self._judge(picture, limits.policy)
        # Of the same picture: a device may have been found since the last look.
        now = {(gate.gate, gate.device): gate.state for gate in self._judge(picture, self._policy)[0].gates}
        return tuple(gate for gate in verdicts.gates if gate.state not in ("open", now.get((gate.gate, gate.device))))


def _watched(reading: Reading[Any], wanted: bool) -> Reading[Any]:
    if not wanted:
        return NOT_WATCHED
    return BEING_READ if reading == NOT_WATCHED else reading


def _reason(gate: Gate) -> str:
    where = f" of {gate.device}" if gate.device else ""
    return f"the gate {gate.gate}{where} is closed: {gate.reading}"


def _news(gate: Gate, old: str) -> tuple[str, str]:
    limit = f" (limit: {gate.limit})" if gate.limit else ""
    match gate.state:
        case "closed":
            return "warning", f"gate {gate.gate} closed: {gate.reading}{limit}"
        case "unknown":
            return "warning", f"gate {gate.gate} stays open: {gate.reading}{limit}; make it strict to stop work then"
    return "info", f"gate {gate.gate} open: {gate.reading}"


def _less(info: DeviceInfo, reserve: int) -> DeviceInfo:
    total, free = info.memory_bytes, info.free_bytes
    return replace(
        info,
        memory_bytes=total if isinstance(total, Unavailable) else max(0, total - reserve),
        free_bytes=free if isinstance(free, Unavailable) else max(0, free - reserve),
    )
