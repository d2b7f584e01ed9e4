"""What Prometheus reads: the hub's state as it is when asked, and what the HTTP side has answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge, Histogram, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from distensor.core.clock import Clock
from distensor.core.control import JobState, Mesh
from distensor.hub.machine import HubMachine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0)


class HttpMeter:
    """Requests by route, never by path: a path has names of jobs and accounts in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answered = Count(
            "distensor_http_requests", "Requests that were answered.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "distensor_http_request_seconds",
            "How long an answer took, streams until their end.",
            ("route",),
            buckets=_BUCKETS,
            registry=registry,
        )

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "PATCH", "OPTIONS") else "other"
        self._answered.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


class HubCollector(Collector):
    """The hub's registries, read in the hub's own event loop. `readable` is whether the books can be written."""

    def __init__(self, machine: HubMachine, clock: Clock, writable: Callable[[], bool]) -> None:
        self._machine = machine
        self._clock = clock
        self._writable = writable

    def collect(self) -> Iterable[Metric]:
        mesh = self._machine.mesh(self._clock.monotonic())
        yield _gauge("distensor_hub_generation", "How often this hub has been started.", mesh.generation)
        yield _gauge("distensor_hub_writable", "1 while the books can be written.", int(self._writable()))
        yield from self._nodes(mesh)
        yield from self._jobs()

    @staticmethod
    def _nodes(mesh: Mesh) -> Iterable[Metric]:
        here = sum(node.connected for node in mesh.nodes)
        yield _gauge("distensor_nodes_connected", "Nodes whose heartbeats are answered.", here)
        slots = sum(device.slots for device in mesh.devices if device.unusable is None)
        yield _gauge("distensor_workers", "Workers that the connected nodes take at once.", slots)
        yield _gauge("distensor_workers_free", "Of these, those that a job may have now.", mesh.available_workers)

    def _jobs(self) -> Iterable[Metric]:
        jobs = self._machine.summaries(None, ended=False)
        states = Counter(job.state for job in jobs)
        family = GaugeMetricFamily("distensor_jobs", "Jobs that have not ended.", labels=("state",))
        for state in JobState:
            if not state.ended:
                family.add_metric((state.value,), states[state])
        yield family
        running = sum(job.workers for job in jobs if job.state is JobState.RUNNING)
        yield _gauge("distensor_ranks_running", "Ranks of jobs that run, without aggregators.", running)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


class Streams:
    """How many streams of events are open."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = 0
        gauge = Gauge("distensor_http_streams", "Streams of events that are open.", registry=registry)
        gauge.set_function(lambda: self.open)

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Metrics:
    """All of them."""

    def __init__(self, machine: HubMachine, clock: Clock, writable: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.http = HttpMeter(self.registry)
        self.streams = Streams(self.registry)
        self.registry.register(HubCollector(machine, clock, writable))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
