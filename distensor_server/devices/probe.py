"""The short-lived child that touches drivers: `python -m distensor_server.devices.probe FAMILY`.

One JSON object on stdout. A family is a child of its own, because a probe may hang (NVML), abort the process (mlx
without Metal) or cost a second and 200 MB (torch). `watch FAMILY` repeats the answer every two seconds until
its stdin ends. Nothing of the supervisor is imported, so that a start costs little more than the interpreter.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable
from typing import Any

from distensor_server.devices.amdgpu import amd_session, probe_amd
from distensor_server.devices.amdlibrary import open_library, probe_library
from distensor_server.devices.nvml import Json, Session, has_hardware, probe_nvml

WATCH_SECONDS = 2.0
APPLE_SECONDS = 5.0
"""A reading of a Mac starts two programs."""


def probe_cuda() -> Json:
    try:
        import pynvml
    except ImportError:
        hint = "install distensor-server again: it brings nvidia-ml-py"
        return {"error": {"code": 0, "message": "the module pynvml is missing", "hint": hint}}
    answer = probe_nvml(pynvml)
    return {**answer, "hardware": has_hardware()} if "error" in answer else answer


def probe_torch() -> Json:
    """What the torch that workers will use can run on."""
    try:
        import torch
    except ImportError as error:
        return {"error": {"code": 0, "message": f"torch cannot be imported: {error}", "hint": ""}}
    hip = getattr(torch.version, "hip", None)
    return {
        "version": str(torch.__version__),
        "rocm": bool(hip and torch.cuda.is_available()),
        "rocm_build": hip,
        "cuda": bool(torch.version.cuda and torch.cuda.is_available()),
        "cuda_build": torch.version.cuda,
        "mps": bool(torch.backends.mps.is_available()),
        "mps_build": bool(torch.backends.mps.is_built()),
        "mps_memory": torch.mps.recommended_max_memory() if torch.backends.mps.is_available() else None,
    }


def probe_mlx() -> Json:
    try:
        import mlx.core as mx
    except ImportError as error:
        return {"error": {"code": 0, "message": f"mlx cannot be imported: {error}", "hint": ""}}
    return {"metal": bool(mx.metal.is_available())}


def watch(family: str) -> None:
    """Answer every other second until stdin ends."""
    ask = WATCHED[family]()
    while True:
        _print(ask())
        readable, _, _ = select.select([sys.stdin], [], [], APPLE_SECONDS if family == "apple" else WATCH_SECONDS)
        if readable and not sys.stdin.readline():
            return


def selftest(device: str) -> Json:
    """Compare the torch device of this name with the CPU."""
    from distensor_server.devices.selftest import faults

    return {"faults": faults(device)}


def _nvml_session() -> Callable[[], Json]:
    import pynvml

    return Session(pynvml).sample


def _apple_session() -> Callable[[], Json]:
    from distensor_server.devices.macos import apple_session  # loads what only a Mac needs

    return apple_session()


FAMILIES: dict[str, Callable[[], Json]] = {
    "cuda": probe_cuda,
    "rocm": probe_amd,
    "apple": lambda: _apple_session()(),
    "torch": probe_torch,
    "mlx": probe_mlx,
    "amdsmi": probe_library,
}
WATCHED: dict[str, Callable[[], Callable[[], Json]]] = {
    "cuda": _nvml_session,
    "rocm": lambda: amd_session(open_it=open_library),
    "apple": _apple_session,
}
"""By family: what makes the function that is asked again and again."""


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    family = argv[0] if argv else ""
    if family == "watch" and argv[1:] and argv[1] in WATCHED:
        watch(argv[1])
        return 0
    if family == "selftest" and argv[1:]:
        _print(selftest(argv[1]))
        return 0
    probe = FAMILIES.get(family)
    if probe is None:
        sys.stderr.write(
            f"unknown family {family!r}; expected one of {', '.join(FAMILIES)}, watch FAMILY, selftest DEVICE\n"
        )
        return 64
    _print(probe())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
