"""The parts of one node, and what they share: the state of the owner's wish, the events, the picture of the moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from distensor import __version__
from distensor.core.clock import Clock
from distensor.core.control import Assignment, NodeInfo
from distensor_server.addresses import candidates
from distensor_server.books import Books
from distensor_server.claims import ClaimBacklog
from distensor_server.config import Layer, Limits, Settings, make_limits
from distensor_server.devices.detect import Detector
from distensor_server.devices.host import Host
from distensor_server.feature import Feature, Features
from distensor_server.hubevents import HubEvents
from distensor_server.hublink import HubLink, LinkFactory
from distensor_server.inventory import Inventory
from distensor_server.journal import Journal
from distensor_server.lifecycle import RestartPolicy
from distensor_server.nodestate import NodeState, node_state
from distensor_server.orphans import WorkerRegistry
from distensor_server.ownaddress import OwnAddress
from distensor_server.picture import Hold, LoggedEvent, Picture
from distensor_server.sections import Sections, build_sections
from distensor_server.statedir import StateDirectory
from distensor_server.surroundings.surroundings import Surroundings
from distensor_server.workerevents import WorkerEvents
from distensor_server.workforce import WorkerSetup, Workforce

EXCUSED_SECONDS = 60.0
"""So long after a sleep a lost peer, hub or worker is a consequence of it, not a fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the node is given of the world outside; tests give fakes."""

    clock: Clock
    make_link: LinkFactory
    worker_command: Sequence[str]
    detector: Detector = field(default_factory=Detector)
    host: Host = field(default_factory=Host)
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    environment: Mapping[str, str] = field(default_factory=dict)
    surroundings: Surroundings = field(default_factory=Surroundings)


class Node:
    """What features see of the supervisor and may ask of it. Everything belongs to the event loop.

    `on_change` says that something in the sections may be new.
    """

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        *,
        features: Sequence[FeatureFactory],
        on_change: Callable[[], None],
        on_connected: Callable[[str | None], None],
    ) -> None:
        self.settings = settings
        self.clock = machine.clock
        self.environment = machine.environment
        self.detector = machine.detector
        self.on_change = on_change
        self.surroundings = machine.surroundings
        self.layers: tuple[Layer, ...] = settings.layers()
        """Where the settings came from."""
        self.limits: Limits = make_limits(self.layers)
        self.state = StateDirectory(settings.state_dir)
        self.hold: Hold | None = None
        """What the owner asked for last; `owner.py` changes it."""
        self.outside: tuple[str, ...] = ()
        """Addresses by which the router lets others in, tried last: peers at home need none. `ports` changes them."""
        self.stopping: str | None = None
        """Why the node is on its way out."""
        self.woken_at: float | None = None
        """Monotonic time of the last wake-up."""
        self.started_at = self.state_since = machine.clock.now()
        self.features = Features(lambda words: self.journal.add("error", "supervisor", words))
        self.journal = Journal(machine.clock, self._tell_event)
        self.inventory = Inventory(
            host=machine.host,
            detector=machine.detector,
            limits=self.limits,
            clock=machine.clock,
            on_event=self.journal.add,
            on_change=on_change,
        )
        self.registry = WorkerRegistry(self.state.workers)
        self.books = Books(self.state, machine.clock)
        self.workforce = Workforce(self._worker_setup(machine), self.inventory, self._worker_events())
        hub_events = HubEvents(self, on_connected)
        self.link: HubLink = machine.make_link(
            self.state.credential, self.describe, self.workforce.running, hub_events, machine.clock
        )
        self.address = OwnAddress(settings.host, lambda: self.link.status.address)
        self.claims = ClaimBacklog(self)
        self.features.add(self.claims)
        for make in features:
            self.features.add(make(self))
        self._state: NodeState | None = None
        self._section_builders = self.features.section_builders()

    def _worker_setup(self, machine: Machine) -> WorkerSetup:
        return WorkerSetup(
            command=machine.worker_command,
            listen_host=lambda: self.address.current,
            listen_ports=lambda: self.limits.worker_port_range,
            logs=self.state.logs,
            mark=self.registry.mark,
            clock=machine.clock,
            oom_kills=machine.host.oom_kills,
            excused=self.just_woken,
            policy=replace(machine.policy, step_within=self.limits.step_limit_seconds),
        )

    def _worker_events(self) -> WorkerEvents:
        return WorkerEvents(self, self.registry)

    def _tell_event(self, event: LoggedEvent) -> None:
        self.features.tell("on_event", lambda feature: feature.on_event(event))
        self.on_change()

    def refusal(self, assignment: Assignment | None = None) -> str | None:
        """Why new work is not taken, in general or this one."""
        return self.stopping or self.features.refusal(assignment)

    def reconsider(self) -> None:
        """Tell the hub whether new work may come; to be called when a `refusal` may have changed."""
        self.link.set_accepting(self.refusal() is None)
        self.on_change()

    def set_limits(self, limits: Limits, layers: Sequence[Layer]) -> None:
        """From now on these hold; `layers` are what they were made from."""
        self.limits, self.layers = limits, tuple(layers)
        self.workforce.policy = replace(self.workforce.policy, step_within=limits.step_limit_seconds)
        self.inventory.set_limits(limits)
        self.features.tell("on_limits", lambda feature: feature.on_limits(limits))

    def woke(self) -> None:
        """The machine slept or this process was stopped: what is lost now is nobody's fault."""
        self.woken_at = self.clock.monotonic()
        self.inventory.wake()
        self.link.wake()
        self.features.tell("on_woken", lambda feature: feature.on_woken())

    def clock_was_set(self, by: float) -> None:
        """Wall time jumped: times that say since when something is so move along."""
        self.started_at += by
        self.state_since += by
        self.workforce.clock_was_set(by)
        self.features.tell("on_clock_set", lambda feature: feature.on_clock_set(by))

    def just_woken(self) -> bool:
        """Whether failures of this moment are the sleep's."""
        return self.woken_at is not None and self.clock.monotonic() - self.woken_at < EXCUSED_SECONDS

    def describe(self) -> NodeInfo:
        """What the hub is told of this node."""
        first, *others = *candidates(self.address.look(), self.settings.advertise), *self.outside
        return NodeInfo(
            name=self.settings.name,
            host=first,
            hosts=tuple(others),
            version=__version__,
            devices=tuple(self.features.offer(device.info()) for device in self.inventory.devices),
        )

    def picture(self) -> Picture:
        """This moment as a value."""
        return Picture(
            name=self.settings.name,
            version=__version__,
            now=self.clock.now(),
            started_at=self.started_at,
            detected=self.inventory.detected,
            stopping=self.stopping,
            hold=self.hold,
            link=self.link.status,
            devices=self.inventory.devices,
            workers=tuple(worker.view() for worker in self.workforce.workers),
            jobs=self.workforce.jobs,
            earnings=self.books.earnings,
            earnings_at=self.books.confirmed_at,
            today_micro=self.books.today_micro,
            events=tuple(self.journal),
            gates=self.features.gates(),
            unanswered=self.link.unanswered_claims,
            unwritten=self.journal.unwritten,
            helper_pids=frozenset(self.inventory.helper_pids),
        )

    def note_state(self) -> Picture:
        """This moment, with `state_since` set when the state word is a new one."""
        picture = self.picture()
        state = node_state(picture)
        if state is not self._state:
            self._state, self.state_since = state, picture.now
        return picture

    def sections(self) -> Sections:
        """What others see: of the local protocol, of the metrics, and of the snapshot that stays behind."""
        picture = self.note_state()
        more = {name: build(picture) for name, build in self._section_builders.items()}
        return {**build_sections(picture, self.state_since), **more}


FeatureFactory: TypeAlias = Callable[[Node], Feature]
