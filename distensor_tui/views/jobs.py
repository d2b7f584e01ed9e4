"""Jobs and this node's workers in them."""

from __future__ import annotations

from collections.abc import Sequence

from distensor_tui import format as fmt
from distensor_tui.model import AuthState, HubState, Job, Replicas, Snapshot, Worker
from distensor_tui.scene import Look, View
from distensor_tui.text import EMPTY, Line, Span, Tone, fill, join, line, spread, width
from distensor_tui.views import faults
from distensor_tui.views.draw import Column, Panel, bar, paragraph, shares, sparkline, table

_GOOD, _BUSY, _BAD = {"training", "running"}, {"starting", "loading", "ready", "waiting", "draining"}, {"broken"}
SPLIT_CELLS = 12
NARROW_CELLS = 90


def panel(view: View, size: int, look: Look) -> Panel:
    jobs, workers = view.snapshot.live_jobs, view.snapshot.live_workers
    if view.snapshot.jobs is None and view.snapshot.workers is None:
        return Panel("Jobs", "2", paragraph("Waiting for the supervisor's list of jobs...", size, Tone.DIM))
    if not jobs and not workers:
        return Panel("Jobs", "2", empty(view, size, look))
    rows = [row for job in jobs for row in job_rows(job, view, size, look)]
    note = line((fmt.plural(len(workers), "worker"), Tone.DIM))
    return Panel("Jobs", "2", rows + _worker_rows(workers, view.snapshot, size, look), note)


def empty(view: View, size: int, look: Look) -> list[Line]:
    """No job: say what has to happen for one to come."""
    hub, auth = view.snapshot.hub, view.snapshot.auth
    if broken := view.snapshot.broken("hub"):
        return [*paragraph("No job, and none can come:", size, Tone.DIM), *faults.rows(broken, size, look)]
    if auth is not None and auth.state is AuthState.MISSING:
        text = "No job. This machine has no key yet: press 1, then a."
    elif hub is not None and hub.state is not HubState.CONNECTED:
        text = "No job. The hub is not connected, so none can come."
    elif view.snapshot.node is not None and any(not gate.open for gate in view.snapshot.node.why):
        text = "No job. A gate is closed (press w), so the hub gives this node none."
    else:
        text = "No job. This node is ready; the hub gives it work as soon as a trainer asks for it."
    return paragraph(text, size, Tone.DIM)


def job_rows(job: Job, view: View, size: int, look: Look) -> list[Line]:
    head = line(
        (job.name or job.id, Tone.STRONG),
        (f"  {job.state}", Tone.GOOD if job.state == "running" else Tone.WARN),
        (f"  epoch {job.epoch}  " if size >= 70 or not look.narrow else "  ", Tone.DIM),
    )
    left = view.history.seconds_left(job)
    tail = line((f"  {fmt.coarse(left)} left", Tone.DIM)) if left is not None else EMPTY
    if look.narrow:
        return [(*head, *_steps(job, size - width(head) - width(tail), 24, look), *tail), _curve(job, view, size, look)]
    return [spread(head, tail, size), _steps(job, size, size, look), _curve(job, view, size, look)]


def _steps(job: Job, room: int, longest: int, look: Look) -> Line:
    """'step 120/600' and a gauge of it."""
    if job.step is None:
        return line(("no step yet", Tone.DIM))
    if not job.total_steps:
        return line(("step ", Tone.DIM), (f"{job.step:,}", Tone.STRONG))
    text = line(("step ", Tone.DIM), (f"{job.step:,}", Tone.STRONG), (f"/{job.total_steps:,} ", Tone.DIM))
    gauge = min(longest, room - width(text) - 5)
    share = job.step / job.total_steps
    if gauge < 5:
        return text
    return (*text, *bar(share, gauge, look.glyphs), Span(f" {fmt.percent(share):>4}"))


def _curve(job: Job, view: View, size: int, look: Look) -> Line:
    rest = join(
        (
            line((fmt.amount(job.tokens_per_second), Tone.STRONG), (" tok/s", Tone.DIM)),
            line((f"{job.units:,}", Tone.STRONG), (" units", Tone.DIM)),
        ),
        Span("   "),
    )
    start = line(("loss ", Tone.DIM), (fmt.loss(job.loss), Tone.STRONG), " ")
    room = min(32, size - width(start) - width(rest) - 3)
    curve = sparkline(view.history.losses(job.id), room, look.glyphs)
    return (*start, Span(fill(curve, max(0, room)) + "  ", Tone.ACCENT), *rest)


COLUMNS = (
    Column("worker", least=8),
    Column("rank", right=True),
    Column("stage", right=True),
    Column("device", least=4),
    Column("state", least=7),
    Column("step", right=True),
    Column("tok/s", right=True),
    Column("memory", right=True),
)


def _worker_rows(workers: Sequence[Worker], snapshot: Snapshot, size: int, look: Look) -> list[Line]:
    if not workers:
        return paragraph("None of its workers runs here now.", size, Tone.DIM)
    head, *body = worker_table(workers, size, look)
    rows: list[Line] = [head]
    for row, worker in zip(body, workers, strict=True):
        broken = snapshot.broken("worker", worker.id)
        rows += [row, *(faults.rows(broken, size, look) if broken else _last_exit(worker, look))]
    return rows


def worker_table(workers: Sequence[Worker], size: int, look: Look, *, names: bool = False) -> list[Line]:
    """Header and one row per worker; where there is room, with the split of its step. `names`: always their ids."""
    left_out = () if size >= NARROW_CELLS else ("memory",) if names else ("worker", "memory")
    columns = [c for c in COLUMNS if c.title not in left_out]
    skip = {i for i, c in enumerate(COLUMNS) if c not in columns}
    cells = [[c for i, c in enumerate(_cells(w, look)) if i not in skip] for w in workers]
    head, *body = table(columns, cells, size)
    room = min(28, size - width(head) - 2)
    if room >= SPLIT_CELLS:
        head = (*head, Span("  " + "compute/sync/wait"[:room], Tone.DIM))
        body = [(*row, Span("  "), *split_bar(w, room, look)) for row, w in zip(body, workers, strict=True)]
    return [head, *body]


def _last_exit(worker: Worker, look: Look) -> list[Line]:
    """Below a worker that was restarted: why its last process ended."""
    if not worker.last_exit or worker.finished:
        return []
    again = f" ({fmt.plural(worker.restarts, 'restart')})" if worker.restarts else ""
    text = f"  {look.glyphs.warn} last exit: {worker.last_exit}{again}"
    return [line((text, Tone.BAD if worker.state in _BAD else Tone.WARN))]


def _cells(worker: Worker, look: Look) -> list[Span | str]:
    return [
        worker.id,
        str(worker.rank),
        stages(worker),
        worker.device,
        Span(f"{_mark(worker, look)} {'finished' if worker.finished else worker.state}", _tone(worker)),
        "-" if worker.step is None else f"{worker.step:,}",
        fmt.amount(worker.tokens_per_second),
        fmt.memory(worker.rss),
    ]


def _mark(worker: Worker, look: Look) -> str:
    """Without colours the states still differ."""
    if worker.finished:
        return look.glyphs.ok
    if worker.state in _BAD:
        return look.glyphs.no
    return look.glyphs.dot if worker.state in ("running", "ready", "starting") else look.glyphs.warn


def _tone(worker: Worker) -> Tone:
    return Tone.DIM if worker.finished else state_tone(worker.state)


def stages(worker: Worker) -> str:
    return ",".join(map(str, worker.stages)) or "-"


def state_tone(state: str) -> Tone:
    if state in _GOOD:
        return Tone.GOOD
    return Tone.ACCENT if state in _BUSY else Tone.BAD


def split_bar(worker: Worker, size: int, look: Look) -> Line:
    """Where the time of a step goes, as one bar of three colours."""
    parts = (worker.compute_s, worker.sync_s, worker.wait_s)
    if sum(parts) <= 0:
        return line(("-", Tone.DIM))
    kinds = (
        (look.glyphs.bar, Tone.COMPUTE),
        (look.glyphs.stitch, Tone.SYNC),
        (look.glyphs.track, Tone.WAIT),
    )
    return line(*((glyph * n, tone) for (glyph, tone), n in zip(kinds, shares(parts, size), strict=True)))


NOTABLE = 2.0
"""Times fewer bytes than a ring all-reduce that are worth a word."""

JOB_COLUMNS = (
    Column("job", least=10),
    Column("state"),
    Column("epoch", right=True),
    Column("step", right=True),
    Column("loss", right=True),
    Column("tok/s", right=True),
    Column("parallel", least=10),
    Column("sync"),
    Column("nodes", right=True),
    Column("units", right=True),
)


def page(view: View, size: int) -> list[Line]:
    """Header and one row per job, the ended ones too; a narrow screen leaves what Enter shows to Enter. Nothing is said
    of replicas where no job has several."""
    narrow = size < NARROW_CELLS
    cells = [_job_cells(job, _replicas(job, view), narrow=narrow) for job in view.snapshot.jobs or ()]
    hidden = {"epoch", "nodes", "sync"} if narrow else set()
    if not any(_replicas(job, view) for job in view.snapshot.jobs or ()):
        hidden.add("sync")
    shown = [i for i, c in enumerate(JOB_COLUMNS) if c.title not in hidden]
    return table([JOB_COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in cells], size)


def _replicas(job: Job, view: View) -> Replicas | None:
    """Of the worker here that sent most."""
    found = [w.replicas for w in view.snapshot.workers or () if w.job == job.id and w.replicas is not None]
    return max(found, key=lambda each: each.up, default=None)


def _sync(replicas: Replicas | None) -> str:
    if replicas is None:
        return "-"
    if replicas.reduction is None or replicas.reduction < NOTABLE:
        return replicas.how
    return f"{replicas.how} {replicas.reduction:,.3g}x less"


def sync_line(replicas: Replicas) -> str:
    """How replicas agree and what it costs, for details."""
    bytes_ = f"{fmt.memory(replicas.up)} up, {fmt.memory(replicas.down)} down a step"
    small = replicas.reduction is None or replicas.reduction < NOTABLE
    less = "" if small else f", {replicas.reduction:,.3g}x less than a ring all-reduce"
    return f"{replicas.how}: {bytes_}{less}"


def _job_cells(job: Job, replicas: Replicas | None, *, narrow: bool) -> list[Span | str]:
    step = "-" if job.step is None else f"{job.step:,}"
    return [
        Span(job.name or job.id, Tone.STRONG),
        Span(job.state, Tone.GOOD if job.state == "running" else Tone.DIM),
        str(job.epoch),
        f"{step}/{job.total_steps:,}" if job.total_steps else step,
        fmt.loss(job.loss),
        fmt.amount(job.tokens_per_second),
        short_parallel(job) if narrow else parallel(job),
        _sync(replicas),
        str(len({member.node for member in job.members})),
        f"{job.units:,}",
    ]


def short_parallel(job: Job) -> str:
    p = job.parallel
    return f"DP{p.dp} TP{p.tp} PP{p.pp} CP{p.cp}"


def parallel(job: Job) -> str:
    p = job.parallel
    return f"DP {p.dp} x TP {p.tp} x PP {p.pp} x CP {p.cp}"


def workers_page(view: View, size: int, look: Look) -> list[Line]:
    workers = view.snapshot.workers or ()
    return _worker_rows(workers, view.snapshot, size, look) if workers else [line(("no workers", Tone.DIM))]


def detail(job: Job, view: View) -> list[tuple[str, str]]:
    facts = [
        ("job", job.name or job.id),
        ("id", job.id),
        ("state", job.state),
        ("epoch", str(job.epoch)),
        ("parallel", parallel(job) + (f"  order {job.parallel.order}" if job.parallel.order else "")),
        ("step", "-" if job.step is None else f"{job.step:,} of {job.total_steps or '?'}"),
        ("loss", fmt.loss(job.loss)),
        ("speed", f"{fmt.amount(job.tokens_per_second)} tok/s"),
        ("units here", f"{job.units:,}"),
    ]
    if (replicas := _replicas(job, view)) is not None:
        facts.append(("replicas", sync_line(replicas)))
    mine = [w for w in view.snapshot.workers or () if w.job == job.id]
    return facts + [(f"rank {w.rank}", worker_line(w)) for w in mine]


def worker_line(worker: Worker) -> str:
    """One sentence about a worker, for details and plain text."""
    parts = [f"{worker.state} on {worker.device}", f"stage {stages(worker)}"]
    parts += [f"pid {worker.pid}"] if worker.pid is not None else []
    parts += [fmt.memory(worker.rss)] if worker.rss is not None else []
    parts += [f"last exit: {worker.last_exit}"] if worker.last_exit else []
    return ", ".join(parts)


def worker_detail(worker: Worker) -> list[tuple[str, str]]:
    """Everything that is known of one worker."""
    times = (("compute", worker.compute_s), ("sync", worker.sync_s), ("wait", worker.wait_s))
    split = ", ".join(f"{name} {fmt.seconds(value)}" for name, value in times) if worker.step is not None else "-"
    return [
        ("worker", worker.id),
        ("job", f"{worker.job_name or worker.job}, epoch {worker.epoch}"),
        ("place", f"rank {worker.rank}, stage {stages(worker)}, on {worker.device}"),
        ("state", f"{worker.state}, {fmt.plural(worker.restarts, 'restart')}"),
        ("process", f"{'-' if worker.pid is None else worker.pid}, {fmt.memory(worker.rss)}"),
        ("step", "-" if worker.step is None else f"{worker.step:,}, loss {fmt.loss(worker.loss)}"),
        ("speed", f"{fmt.amount(worker.tokens_per_second)} tok/s"),
        ("a step takes", split),
        *([] if worker.replicas is None else [("replicas", sync_line(worker.replicas))]),
        ("last exit", worker.last_exit or "none"),
    ]
