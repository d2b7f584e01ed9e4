"""The short-lived child that touches drivers: `python -m distensor_server.devices.probe FAMILY`.

One JSON object on stdout. A family is a child of its own, because a probe may hang (NVML), abort the process (mlx
without Metal) or cost a second and 200 MB (torch). `watch` repeats NVML's answer every two seconds until its stdin
ends. Nothing of the supervisor is imported, so that a start costs little more than the interpreter.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable
from typing import Any

from distensor_server.devices.nvml import Json, Session, has_hardware, probe_nvml

WATCH_SECONDS = 2.0


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
    return {
        "version": str(torch.__version__),
        "cuda": bool(torch.version.cuda and torch.cuda.is_available()),
        "cuda_build": torch.version.cuda,
        "mps": bool(torch.backends.mps.is_available()),
        "mps_build": bool(torch.backends.mps.is_built()),
    }


def probe_mlx() -> Json:
    try:
        import mlx.core as mx
    except ImportError as error:
        return {"error": {"code": 0, "message": f"mlx cannot be imported: {error}", "hint": ""}}
    return {"metal": bool(mx.metal.is_available())}


def watch() -> None:
    import pynvml

    session = Session(pynvml)
    while True:
        _print(session.sample())
        readable, _, _ = select.select([sys.stdin], [], [], WATCH_SECONDS)
        if readable and not sys.stdin.readline():
            return


FAMILIES: dict[str, Callable[[], Json]] = {"cuda": probe_cuda, "torch": probe_torch, "mlx": probe_mlx}


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    family = argv[0] if argv else ""
    if family == "watch":
        watch()
        return 0
    probe = FAMILIES.get(family)
    if probe is None:
        sys.stderr.write(f"unknown family {family!r}; expected one of {', '.join(FAMILIES)}, watch\n")
        return 64
    _print(probe())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
