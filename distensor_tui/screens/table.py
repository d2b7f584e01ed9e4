"""All screens by their digit."""

from __future__ import annotations

from distensor_tui.scene import Scene, Screen
from distensor_tui.screens import devices, earnings, home, jobs, limits, log, topology
from distensor_tui.screens.page import ScreenSpec
from distensor_tui.views.header import Notice, troubles

SCREENS: dict[Screen, ScreenSpec] = {
    spec.screen: spec
    for spec in (home.SPEC, jobs.SPEC, topology.SPEC, earnings.SPEC, limits.SPEC, devices.SPEC, log.SPEC)
}


def spec(scene: Scene) -> ScreenSpec:
    """The screen that is open."""
    return SCREENS[scene.ui.screen]


def notices(scene: Scene) -> list[Notice]:
    """All that the user should know, the worst first: the node's troubles, then what each screen has to say."""
    own = [notice for found in SCREENS.values() for notice in found.notices(scene)] if scene.view.has_data else []
    return [*troubles(scene.view, scene.look), *own]
