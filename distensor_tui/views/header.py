"""The lines above and below the panels: who, in which state, what comes next, which keys."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import __version__
from distensor_tui import format as fmt
from distensor_tui.model import Fault, Gate, Hub, HubState, Node, NodeState
from distensor_tui.scene import Look, Screen, Ui, View
from distensor_tui.text import EMPTY, Line, Span, Tone, cells, join, line, pad, spread, width
from distensor_tui.views import faults
from distensor_tui.views.gates import label, next_change
from distensor_tui.views.limits import slowed

GAP = Span("   ")
_PILLS = {
    NodeState.EARNING: Tone.PILL_GOOD,
    NodeState.IDLE: Tone.PILL_CALM,
    NodeState.STARTING: Tone.PILL_CALM,
    NodeState.WAITING: Tone.PILL_WARN,
    NodeState.PAUSED: Tone.PILL_WARN,
    NodeState.DRAINING: Tone.PILL_WARN,
    NodeState.DEGRADED: Tone.PILL_BAD,
    NodeState.OFFLINE: Tone.PILL_BAD,
    NodeState.UNKNOWN: Tone.PILL_WARN,
}


def header(view: View, look: Look) -> list[Line]:
    """One line where there is room, two on a small screen."""
    node = view.snapshot.node
    if node is None:
        return [pad(join((_brand(), _source(view)), GAP), look.width)]
    first = (_brand(), line((node.name or node.id, Tone.STRONG)), _state(node, look), _replay(view))
    second = (_jobs(view, look), _hub(view.snapshot.hub, look), _uptime(node, look))
    if look.width >= 110:
        parts = join((*first, *second), GAP)
        return [spread(parts, _money(view, look.width - width(parts)), look.width)]
    parts = join(first, GAP)
    money = _money(view, look.width - width(parts))
    return [spread(parts, money, look.width), pad(_indent(join(second, GAP)), look.width)]


def _indent(parts: Line) -> Line:
    return (Span(" "), *parts)


def _brand() -> Line:
    return line((" disTensor", Tone.BRAND), (f" {__version__}", Tone.DIM))


def _source(view: View) -> Line:
    return line((view.feed.source, Tone.DIM)) if view.feed.source else EMPTY


def _replay(view: View) -> Line:
    if not view.feed.replay:
        return EMPTY
    feed = view.feed
    speed = "" if feed.speed == 1 else f" x{feed.speed:g}"
    how = ", ended" if feed.replay_ended else speed if feed.speed else ", held"
    return line(
        (f" RECORDING{how} ", Tone.PILL_CALM), (" Backspace again" if feed.replay_ended else " space + -", Tone.DIM)
    )


def _state(node: Node, look: Look) -> Line:
    glyph = look.glyphs.states[node.state]
    age = f" {fmt.coarse(look.now - node.state_since)}" if node.state_since is not None else ""
    return line((f" {glyph} {node.state} ", _PILLS[node.state]), (age, Tone.DIM))


def _jobs(view: View, look: Look) -> Line:
    devices = view.snapshot.devices or ()
    usable = sum(device.usable for device in devices)
    text = f"{fmt.plural(len(view.snapshot.live_jobs), 'job')}, {usable}/{len(devices)} devices"
    return line((text, Tone.TEXT if usable or not devices else Tone.WARN))


def _hub(hub: Hub | None, look: Look) -> Line:
    if hub is None:
        return line(("hub ", Tone.DIM), "-")
    tone, glyph = hub_mark(hub.state, look)
    if hub.state is HubState.CONNECTED:
        rtt = "" if hub.rtt_ms is None else f" {fmt.seconds(hub.rtt_ms / 1000) if hub.rtt_ms >= 1 else '< 1 ms'}"
        return line(("hub ", Tone.DIM), (glyph, tone), rtt)
    return line(("hub ", Tone.DIM), (f"{glyph} {hub.state}", tone))


def hub_mark(state: HubState, look: Look) -> tuple[Tone, str]:
    if state is HubState.CONNECTED:
        return Tone.GOOD, look.glyphs.dot
    if state in (HubState.CONNECTING, HubState.NO_KEY):
        return Tone.WARN, look.glyphs.ring
    return Tone.BAD, look.glyphs.no


def _uptime(node: Node, look: Look) -> Line:
    if node.started_at is None:
        return EMPTY
    return line(("up ", Tone.DIM), fmt.coarse(look.now - node.started_at))


def _money(view: View, room: int) -> Line:
    """Today's credits, and what is pending where there is room for it."""
    earnings = view.snapshot.earnings
    if earnings is None:
        return EMPTY
    today = line(("today ", Tone.DIM), (f"{fmt.short_credits(earnings.today_micro)} cr", Tone.GOOD))
    if (micro := earnings.pending_micro) is None:
        return (Span(" "), *today, Span(" "))
    text = f"~{fmt.short_credits(micro)}" if earnings.pending_units else "0"
    waiting = line(("  pending ", Tone.DIM), text)
    return (Span(" "), *today, *(waiting if width(today) + width(waiting) + 3 <= room else EMPTY), Span(" "))


Notice = tuple[Tone, str]
"""Something that the user should know, and how bad it is."""


def notice(view: View, look: Look, ui: Ui, notices: Sequence[Notice]) -> Line:
    """The one line that says what matters most now, or what comes next."""
    if ui.toast is not None:
        return pad(line(" ", (ui.toast.text, ui.toast.tone)), look.width)
    tone, text = notices[0] if notices else _coming(view, look) if view.has_data else (Tone.DIM, "")
    others = len(notices) - 1
    more = line((f"{fmt.plural(others, 'more notice')}: ", Tone.DIM), ("n", Tone.KEY), " ") if others > 0 else EMPTY
    if notices and not more and cells(text) > look.width - 4:
        more = line(("all of it: ", Tone.DIM), ("n", Tone.KEY), " ")
    more = (Span(" "), *more) if more else EMPTY
    mark = {Tone.BAD: look.glyphs.no, Tone.WARN: look.glyphs.warn}.get(tone, look.glyphs.right)
    said = line((f" {mark} {_fitting(text, look.width - 4 - width(more))}", tone)) if text else EMPTY
    return spread(said, more, look.width) if more else pad(said, look.width)


def troubles(view: View, look: Look) -> list[Notice]:
    """What is wrong, the worst first."""
    if not view.has_data:
        return []
    first = (_stale(view, look), _hub_trouble(view.snapshot.hub, look), _state_trouble(view, look))
    return [said for said in first if said is not None] + _worker_troubles(view) + _slowed(view) + _unread(view)


def _fitting(text: str, size: int) -> str:
    """Leave out the last parts of a sentence, not half words, when the line is too short for all."""
    parts = text.split("; ")
    while len(parts) > 1 and cells("; ".join(parts)) > size:
        parts.pop()
    return "; ".join(parts)


Said = Notice | None
SLOWING = ("temperature", "power")
"""Gates that slow a device down before they close."""


def _stale(view: View, look: Look) -> Said:
    if not view.stale:
        return None
    feed = view.feed
    title = feed.absence.title if feed.absence else "Connecting to the supervisor again"
    since = ""
    if feed.last_at is not None:
        since = f"; as of {fmt.hour(feed.last_at, look.zone)}, {fmt.span(look.now - feed.last_at)} ago"
    fix = f"; {' '.join(feed.absence.fix[0].split())}" if feed.absence else ""
    return Tone.BAD, f"{title}{since}{fix}"


def _hub_trouble(hub: Hub | None, look: Look) -> Said:
    if hub is None or hub.state in (HubState.CONNECTED, HubState.NO_KEY):  # the gate of the key asks for it
        return None
    if hub.state is HubState.CONNECTING and hub.error is None:
        return Tone.WARN, f"Connecting to the hub {hub.address}"
    since = f" since {fmt.hour(hub.since, look.zone)}" if hub.since is not None else ""
    word = "The hub refused this node" if hub.state is HubState.REJECTED else f"Hub {hub.address} {hub.state}"
    retry = f"; next try {fmt.hour(hub.next_retry_at, look.zone, with_seconds=True)}" if hub.next_retry_at else ""
    why = f": {hub.error.message}" if hub.error and hub.error.message else ""
    fix = f"; {hub.error.fix}" if hub.error and hub.error.fix else ""
    return (Tone.BAD if hub.state is HubState.REJECTED else Tone.WARN), f"{word}{since}{why}{retry}{fix}"


_MEANING = {
    NodeState.PAUSED: ("Paused", "takes no work and earns nothing"),
    NodeState.DRAINING: ("Draining", "running work finishes its step, no new work is taken"),
    NodeState.WAITING: ("Waiting", "work comes when the gate opens"),
    NodeState.DEGRADED: ("Degraded", "something needs attention"),
    NodeState.OFFLINE: ("Offline", "no connection to the hub"),
    NodeState.UNKNOWN: ("Unknown", "this dashboard does not know the supervisor's state word"),
}


def _state_trouble(view: View, look: Look) -> Said:
    node = view.snapshot.node
    meaning = _MEANING.get(node.state) if node else None
    if node is None or meaning is None:
        return None
    word, consequence = meaning
    if node.state is NodeState.DEGRADED and (broken := _broken(view)):
        return Tone.WARN, f"{word}: {broken[0].cause}; {broken[0].fix}"
    closed = [gate for gate in node.why if not gate.open]
    reason = gate_reason(closed[0], look) if closed else _device_reason(view) or consequence
    held = node.state in (NodeState.PAUSED, NodeState.DRAINING)
    key = "press r to resume" if held else "press w for why"
    return Tone.WARN, "; ".join(dict.fromkeys((f"{word}: {reason}", key, consequence)))


def gate_reason(gate: Gate, look: Look) -> str:
    """The gate's own words; those of the owner's pause need no name before them."""
    when = next_change(gate, look)
    name = "" if gate.name == "user_pause" else f"{label(gate)}: "
    return f"{name}{gate.reading}" + (f", {when}" if when else "")


def _device_reason(view: View) -> str:
    for worker in view.snapshot.workers or ():
        if worker.state == "broken":
            return f"the worker of rank {worker.rank} is broken: {worker.last_exit or 'no reason given'}"
    for device in view.snapshot.devices or ():
        if not device.usable and device.reason:
            return f"{device.id}: {device.reason}"
    return ""


def _broken(view: View) -> list[Fault]:
    """Faults besides the hub's, which has its own notice."""
    return [fault for fault in view.snapshot.faults or () if fault.part != "hub"]


def _worker_troubles(view: View) -> list[Notice]:
    """What is broken, and which workers have ended in a job that goes on; an older supervisor names no faults."""
    node, broken = view.snapshot.node, _broken(view)
    told = node is not None and node.state is NodeState.DEGRADED  # the first one stands beside that word
    states = ("broken", "backoff", "exited") if view.snapshot.faults is None else ("exited",)
    ended = [
        (Tone.WARN, f"Worker of rank {worker.rank}: {worker.state}, last exit: {worker.last_exit}")
        for worker in view.snapshot.workers or ()
        if worker.state in states and worker.last_exit and not worker.finished
    ]
    return [(faults.tone(fault), f"{fault.cause}; {fault.fix}") for fault in broken[told:]] + ended


def _slowed(view: View) -> list[Notice]:
    """'gpu1 slowed to 74%: temperature 81 C, limit 80 C'."""
    node = view.snapshot.node
    said = []
    for device, factor in slowed(view.snapshot).items():
        gates = [gate for gate in (node.why if node else ()) if gate.device == device and gate.name in SLOWING]
        reasons = "; ".join(
            f"{gate.name} {gate.reading.partition(',')[0]}, limit {gate.limit}" for gate in gates if gate.limit
        )
        said.append((Tone.WARN, f"{device} slowed to {fmt.percent(factor)}: {reasons or 'press w for why'}"))
    return said


def _unread(view: View) -> list[Notice]:
    said = "Part of the supervisor's data was not understood: "
    return [(Tone.WARN, said + problem) for problem in view.snapshot.problems[:1]]


def _coming(view: View, look: Look) -> tuple[Tone, str]:
    """All is well: what comes next."""
    jobs, node = view.snapshot.live_jobs, view.snapshot.node
    if node is not None and node.state is NodeState.STARTING and not jobs:
        return Tone.DIM, "Starting: looking for devices and the hub."
    if not jobs:
        return Tone.DIM, "All well: the next job comes when a trainer asks for this node."
    job = jobs[0]
    name = job.name or job.id
    if job.step is None:
        return Tone.DIM, f"Next: {name} is starting; its first step follows when all ranks are connected."
    left = view.history.seconds_left(job)
    when = f"; about {fmt.coarse(left)} left" if left is not None else ""
    total = f" of {job.total_steps:,}" if job.total_steps else ""
    after = "; then this node is free for the next job" if total else ""
    return Tone.DIM, f"All well: {name} is at step {job.step:,}{total}{when}{after}"


def footer(look: Look, ui: Ui, keys: Sequence[tuple[str, str]]) -> Line:
    if ui.typing:
        shown = line(
            ("  filter: ", Tone.DIM), (ui.filter + "_", Tone.STRONG), ("   Enter keeps it, Esc drops it", Tone.DIM)
        )
        return pad(shown, look.width)
    screens = [_key(str(int(s)), s.title, active=s is ui.screen) for s in Screen]
    actions = [_key(*pair) for pair in keys]
    candidates = [(screens, actions, gap) for gap in ("  ", " ")]
    candidates += [(_digits(ui), actions, "  "), ([], actions, "  "), ([], actions, " ")]
    bars = [_bar(first, second, gap) for first, second, gap in candidates]
    return pad(next((b for b in bars if width(b) <= look.width), bars[-1]), look.width)


def _bar(first: list[Line], second: list[Line], gap: str) -> Line:
    groups = (join(first, Span(gap)), join(second, Span(gap)))
    return (Span(" "), *join(groups, Span("   ")))


def _digits(ui: Ui) -> list[Line]:
    return [_key("1-7", f"screens ({ui.screen.title})")]


def _key(key: str, what: str, *, active: bool = False) -> Line:
    return line((key, Tone.KEY), (f" {what}", Tone.STRONG if active else Tone.DIM))
