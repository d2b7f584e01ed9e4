"""Checks of Python, torch, our own wheels, and the devices that they reach."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distensor.core.control import DeviceKind
from distensor_server.doctor.model import Finding, World, fail, ok, warning

OLDEST_PYTHON = (3, 11)
TORCH_SECONDS = 60.0
_TORCH = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, "
    "'hip': getattr(torch.version, 'hip', None), 'mps': torch.backends.mps.is_available(), "
    "'sees_cuda': torch.cuda.is_available()}))"
)
_ADDRESS_SPACE = 64


def python(world: World) -> Finding:
    shown = ".".join(map(str, world.python))
    if world.python < OLDEST_PYTHON:
        return fail("python", f"Python {shown} is too old", "install Python 3.11 or newer and disTensor with it")
    if world.bits != _ADDRESS_SPACE:
        return fail("python", f"Python {shown} is built for {world.bits} bits", "install a 64-bit Python")
    return ok("python", f"Python {shown}, {world.bits} bits, {world.platform}")


def wheels(world: World) -> Finding:
    """The wheels belong together: what differs was updated half."""
    installed = {name: version for name, version in world.wheels.items() if version is not None}
    shown = ", ".join(f"{name} {version}" for name, version in sorted(installed.items())) or "none is installed"
    if any(version != world.version for version in installed.values()):
        fix = " ".join(f"'{name}=={world.version}'" for name in sorted(installed))
        return fail("wheels", f"versions differ: {shown}", f"pip install --upgrade {fix}")
    return ok("wheels", shown)


def torch(world: World) -> Finding:
    """In a child: torch does not belong into this process, and a broken one may crash it."""
    said = world.run([sys.executable, "-c", _TORCH], TORCH_SECONDS)
    if said.code is None:
        return fail("torch", f"torch did not start within {TORCH_SECONDS:g} s", "look at the disk: it may be very slow")
    last = said.text.strip().splitlines()[-1:] or ["nothing"]
    if said.code != 0:
        if "No module named 'torch'" in said.text:
            return fail("torch", "torch is not installed", "pip install 'distensor[worker]'")
        if said.code < 0:
            return fail("torch", f"torch crashes (signal {-said.code})", "pip install --force-reinstall torch")
        fix = "pip install --force-reinstall torch   (built for another Python, system or driver)"
        return fail("torch", f"torch cannot be imported: {last[0][:200]}", fix)
    try:
        found = json.loads(last[0])
        built = found["cuda"] or found["hip"] or ("mps" if found["mps"] else "cpu only")
        return ok("torch", f"torch {found['version']} ({built})")
    except (ValueError, KeyError, TypeError):
        return fail("torch", f"torch answers {last[0][:100]!r}", "pip install --force-reinstall torch")


def devices(world: World) -> Sequence[Finding]:
    """One line a device, with the reason where it is not used."""
    found = [*world.devices()]
    rows = [
        ok(f"device {device.device_id}", f"{device.name} can be used")
        if device.unusable is None
        else warning(f"device {device.device_id}", f"{device.name}: {device.unusable}", _device_fix(device.unusable))
        for device in found
    ]
    if all(device.kind is DeviceKind.CPU for device in found):
        rows.append(ok("devices", "no accelerator was found; the CPU can work"))
    return rows


def _device_fix(reason: str) -> str:
    if "torch" in reason:
        return "install a torch that is built for this device: https://pytorch.org/get-started/locally"
    if "permission" in reason.lower():
        return "let this user open the device: sudo usermod -aG render,video $USER, then log in again"
    return "`distensor devices` shows its readings; a new driver or a restart of the machine often helps"


def driver(world: World) -> Sequence[Finding]:
    """The kernel's side of NVIDIA and AMD, where such a card is: the module, and who may open the files."""
    rows: list[Finding] = []
    version = _first_line(world.root / "proc/driver/nvidia/version")
    if version is not None:
        rows.append(ok("driver", version))
        rows += _openable(world, [*sorted((world.root / "dev").glob("nvidia[0-9]*"))], "video")
    elif _has_card(world, "0x10de"):
        fix = "install NVIDIA's driver of your distribution and restart"
        rows.append(fail("driver", "an NVIDIA card is here, and its driver is not loaded", fix))
    if (world.root / "dev/kfd").exists():
        rows += _openable(world, [world.root / "dev/kfd"], "render")
    return rows or [ok("driver", "no card that needs one" if world.platform != "darwin" else "part of macOS")]


def _openable(world: World, files: Sequence[Path], group: str) -> list[Finding]:
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    fix = f"sudo usermod -aG {group} $USER, then log in again"
    return [fail("driver", f"this user may not open /{path.relative_to(world.root)}", fix) for path in closed]


def _has_card(world: World, vendor: str) -> bool:
    """A display controller of this PCI vendor."""
    for device in (world.root / "sys/bus/pci/devices").glob("*"):
        kind = _first_line(device / "class") or ""
        if _first_line(device / "vendor") == vendor and kind.startswith("0x03"):
            return True
    return False


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").splitlines()[0].strip()
    except (OSError, IndexError):
        return None
