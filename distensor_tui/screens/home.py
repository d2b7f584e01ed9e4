"""The Home screen: everything at a glance, in three sizes."""

from __future__ import annotations

from distensor_tui import onboarding
from distensor_tui.scene import Look, Scene, Screen, View
from distensor_tui.screens.page import ScreenSpec
from distensor_tui.text import Line
from distensor_tui.views import curves, devices, earnings, events, jobs, limits, topology, welcome
from distensor_tui.views.draw import Panel, allot, beside, box, section

LEAST_LOG = 6
ROOM_FOR_TOPOLOGY = 16
LEAST_CHART, HIGHEST_CHART = 5, 20


def draw(scene: Scene, height: int) -> list[Line]:
    if onboarding.needs_key(scene):
        return welcome.body(scene.view, height, scene.look)
    return body(scene.view, height, scene.look)


def body(view: View, height: int, look: Look) -> list[Line]:
    if look.narrow:
        return _narrow(view, height, look)
    return _three_columns(view, height, look) if look.wide else _two_columns(view, height, look)


def _narrow(view: View, height: int, look: Look) -> list[Line]:
    """80x24: rules instead of frames; the answers first, events take what is left.

    Where there is little room, or something is broken, the topology is left to its own screen.
    """
    broken = bool(view.snapshot.faults or view.snapshot.failed)
    size = look.width - 1
    panels = [
        (devices.panel(view, size, look), 3),
        (jobs.panel(view, size, look), 4),
        (topology.panel(view, size, look), 5),  # title, stages, two replicas, and a line that counts what is cut off
        (money := earnings.panel(view, size, look), min(len(money.rows) + 1, 5) if broken else 2),
        (events.panel(view, size, look), 2),
    ]
    if height < ROOM_FOR_TOPOLOGY or broken:
        del panels[2]
    heights = allot(height, [(len(p.rows) + 1, min(len(p.rows) + 1, least)) for p, least in panels])
    return [row for (p, _), h in zip(panels, heights, strict=True) for row in section(p, look.width, h, look.glyphs)]


def _stack(panels: list[Panel], size: int, height: int, look: Look, leasts: tuple[int, ...]) -> list[Line]:
    wanted = [(len(p.rows) + 2, min(len(p.rows) + 2, least)) for p, least in zip(panels, leasts, strict=True)]
    heights = allot(height, wanted)
    return [row for p, h in zip(panels, heights, strict=True) for row in box(p, size, h, look.glyphs)]


def _left_panels(view: View, size: int, look: Look) -> list[Panel]:
    inner = size - 4
    return [devices.panel(view, inner, look), earnings.panel(view, inner, look), limits.panel(view, inner, look)]


def _middle_panels(view: View, size: int, look: Look) -> list[Panel]:
    return [jobs.panel(view, size - 4, look), topology.panel(view, size - 4, look)]


def _left(view: View, size: int, height: int, look: Look) -> list[Line]:
    return _stack(_left_panels(view, size, look), size, height, look, (5, 6, 3))


def _middle(view: View, size: int, height: int, look: Look) -> list[Line]:
    return _stack(_middle_panels(view, size, look), size, height, look, (7, 6))


def _two_columns(view: View, height: int, look: Look) -> list[Line]:
    """Panels above, charts in the middle where there is room, events below."""
    left = min(64, look.width * 2 // 5)
    right = look.width - left
    log = events.panel(view, look.width - 4, look)
    upper = _upper_height(view, left, right, height, look)
    charts = _charts(view, (left, right), height - upper - max(LEAST_LOG, min(10, len(log.rows) + 2)), look)
    columns = beside(_left(view, left, upper, look), _middle(view, right, upper, look))
    return [*columns, *charts, *box(log, look.width, height - upper - len(charts), look.glyphs)]


def _upper_height(view: View, left: int, right: int, height: int, look: Look) -> int:
    """What the taller column wants, but the events keep at least a fifth."""
    wanted = max(_wanted(_left_panels(view, left, look)), _wanted(_middle_panels(view, right, look)))
    return min(wanted, height - max(LEAST_LOG, height // 5))


def _wanted(panels: list[Panel]) -> int:
    return sum(len(panel.rows) + 2 for panel in panels)


def _charts(view: View, sizes: tuple[int, int], room: int, look: Look) -> list[Line]:
    """Speed and loss next to each other, as high as there is room."""
    job = curves.shown(view)
    height = min(HIGHEST_CHART, room)
    if job is None or height < LEAST_CHART:
        return []
    left, right = sizes
    speed = curves.speed(view, job, left - 4, height - 2, look)
    loss = curves.loss(view, job, right - 4, height - 2, look)
    return beside(box(speed, left, height, look.glyphs), box(loss, right, height, look.glyphs))


def _three_columns(view: View, height: int, look: Look) -> list[Line]:
    """200x60: topology and log stand side by side; the charts fill what the panels leave."""
    left, right = 56, look.width * 3 // 10
    middle = look.width - left - right
    log = box(events.panel(view, right - 4, look, wrap_rows=True), right, height, look.glyphs)
    upper = max(_wanted(_left_panels(view, left, look)), _wanted(_middle_panels(view, middle, look)))
    charts = _charts(view, (left, middle), height - min(upper, height), look)
    upper = height - len(charts)
    return beside([*beside(_left(view, left, upper, look), _middle(view, middle, upper, look)), *charts], log)


SPEC = ScreenSpec(
    screen=Screen.HOME,
    about="everything at a glance",
    draw=draw,
    actions=(onboarding.ACTION,),
    notices=onboarding.notices,
)
