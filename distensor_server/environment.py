"""The environment of worker and probe processes: an allow-list, so that no secret of the owner's shell gets there."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "DYLD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_HOME",
        "CUDA_PATH",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "MALLOC_ARENA_MAX",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "DISTENSOR_FAULTS",  # faults on purpose, in tests and demonstrations
    }
)
PREFIXES = ("LC_",)

MARK_VARIABLE = "DISTENSOR_WORKER_MARK"
"""A random word for each process: a process that carries it is ours, whatever became of its process id."""


def scrubbed(environment: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """What a child may see of `environment`, and `extra` on top."""
    kept = {name: value for name, value in environment.items() if name in NAMES or name.startswith(PREFIXES)}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}
