"""What AMD's own library tells and sysfs does not: energy, and what holds a GPU back. Runs in the probe child only.

Names and shapes are those of amdsmi 6.0 to 7.0: `amdsmi_get_energy_count` counts in steps of so many microjoules,
`amdsmi_get_violation_status` answers for MI300 and newer, and for older ones `amdsmi_get_gpu_metrics_info` has the bits
of `SMU_THROTTLER_*` in the kernel's amdgpu_smu.h. Where a GPU does not tell, values are the text 'N/A'.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[bytes]"]

MODULE = "amdsmi"
READINGS = ("energy_j", "throttle")
NOT_INSTALLED = "sysfs does not tell; AMD's library does: pip install 'distensor-server[amd]'"
TRIAL_SECONDS = 5.0
VIOLATIONS: Mapping[str, str] = {
    "active_ppt_pwr": "power limit",
    "active_socket_thrm": "heat",
    "active_hbm_thrm": "heat (memory)",
    "active_vr_thrm": "heat (voltage regulator)",
    "active_prochot_thrm": "heat (hardware)",
    "active_gfx_clk_below_host_limit": "limit of the host",
}
BITS: Sequence[tuple[range, str]] = (
    (range(16), "power limit"),
    (range(16, 32), "current limit"),
    (range(32, 48), "heat"),
)


class Library:
    """The module amdsmi behind a seam. One answer that fails costs that reading."""

    def __init__(self, module: Any) -> None:
        """Raises whatever the module raises: it is tried in a child first."""
        self._module = module
        with contextlib.redirect_stdout(sys.stderr):
            module.amdsmi_init()
            handles = module.amdsmi_get_processor_handles()
            self._handles = {str(module.amdsmi_get_gpu_device_bdf(handle)).lower(): handle for handle in handles}

    def sample(self, bus: str) -> Json:
        """The readings of the GPU at this PCI address."""
        handle = self._handles.get(bus.lower())
        if handle is None:
            return {name: {"unavailable": f"amdsmi does not list {bus}"} for name in READINGS}
        return {"energy_j": self._answer(self._energy, handle), "throttle": self._answer(self._throttle, handle)}

    @property
    def buses(self) -> list[str]:
        return sorted(self._handles)

    def _answer(self, ask: Callable[[Any], Any], handle: Any) -> Any:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return ask(handle)
        except Exception as error:  # noqa: BLE001 - its wrappers raise their own tree, KeyError and OSError alike
            words = " ".join(str(error).split())[:120] or type(error).__name__
            return {"unavailable": f"amdsmi: {words}"}

    def _energy(self, handle: Any) -> Any:
        counted = self._module.amdsmi_get_energy_count(handle)
        steps = counted.get("energy_accumulator", counted.get("power"))  # its name before 6.2
        size = counted.get("counter_resolution")
        if not _is_number(steps) or not _is_number(size):
            return {"unavailable": "amdsmi: this GPU does not count its energy"}
        return steps * size / 1e6

    def _throttle(self, handle: Any) -> Any:
        ask = getattr(self._module, "amdsmi_get_violation_status", None)
        found = self._answer(ask, handle) if ask is not None else {}
        told = {name: found.get(name) for name in VIOLATIONS if _is_flag(found.get(name))}
        if told:
            return [VIOLATIONS[name] for name, active in told.items() if active]
        bits = self._module.amdsmi_get_gpu_metrics_info(handle).get("indep_throttle_status")
        if not _is_number(bits):
            return {"unavailable": "amdsmi: this GPU does not tell what holds it back"}
        words = [word for places, word in BITS if any(int(bits) >> place & 1 for place in places)]
        return words or (["another reason of the firmware"] if bits else [])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or value in (0, 1)


def open_library(find: Callable[[str], object] = importlib.util.find_spec, run: Run = subprocess.run) -> Library | Json:
    """The library, or why there is none. It is C code over drivers: what it does at its start a child tries first."""
    if find(MODULE) is None:
        return {"unavailable": NOT_INSTALLED}
    reason = trial(run)
    return {"unavailable": reason} if reason else Library(importlib.import_module(MODULE))


def trial(run: Run = subprocess.run) -> str:
    """Why the library must not be loaded here; empty when a child of its own survived it."""
    command = [sys.executable, "-m", "distensor_server.devices.probe", MODULE]
    try:
        done = run(command, capture_output=True, timeout=TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"amdsmi gave no answer within {TRIAL_SECONDS:g} s"
    except OSError as error:
        return f"amdsmi could not be tried: {error.strerror}"
    if done.returncode == 0:
        return ""
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"amdsmi failed (exit {done.returncode}): {' '.join(last)[:160]}".rstrip(": ")


def probe_library() -> Json:
    """Load it and read everything once."""
    library = Library(importlib.import_module(MODULE))
    return {"devices": {bus: library.sample(bus) for bus in library.buses}}
