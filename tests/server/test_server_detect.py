"""The probe children for real: what they answer, and that none of them can hold up or outlive its supervisor."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_fakes import eventually

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.reading import Unavailable
from distensor_server.config import Limits
from distensor_server.devices.answers import Answer
from distensor_server.devices.detect import PROBE, Detector, read_answer
from distensor_server.devices.families import WATCHED
from distensor_server.devices.host import Host, HostMemory
from distensor_server.devices.model import Device
from distensor_server.devices.nvidia import cuda_devices
from distensor_server.devices.nvml import has_hardware
from distensor_server.inventory import Inventory

HERE = Path(__file__).parent
MEMORY = HostMemory(total=8 << 30, free=4 << 30)


def python_with(tmp_path: Path, pynvml: str) -> tuple[str, ...]:
    """The real probe beside a `pynvml` of the test's own."""
    (tmp_path / "pynvml.py").write_text(pynvml)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(1, {str(HERE)!r}); "
        "from distensor_server.devices.probe import main; raise SystemExit(main(sys.argv[1:]))"
    )
    return (sys.executable, "-c", code)


GOOD = "from fake_nvml import *; import sys; sys.modules[__name__] = FakeNvml()"


@pytest.mark.asyncio
async def test_a_real_child_reports_a_device(tmp_path: Path) -> None:
    answer = await Detector(command=python_with(tmp_path, GOOD)).ask("cuda", 20)
    assert not isinstance(answer, Unavailable)
    assert answer["devices"][0]["uuid"] == "GPU-0"


@pytest.mark.asyncio
async def test_a_child_that_hangs_is_killed_in_time(tmp_path: Path) -> None:
    detector = Detector(
        command=python_with(tmp_path, "import time; time.sleep(600)"), quick_seconds=1.0, platform="linux"
    )
    began = time.monotonic()
    (device,) = await detector.accelerators(MEMORY)
    assert time.monotonic() - began < 5
    assert "no answer within 1 s" in (device.unusable or "")


@pytest.mark.asyncio
async def test_a_child_that_aborts_is_a_reason(tmp_path: Path) -> None:
    detector = Detector(command=python_with(tmp_path, "import os; os.abort()"), platform="linux")
    (device,) = await detector.accelerators(MEMORY)
    assert "signal 6 (SIGABRT)" in (device.unusable or "")


@pytest.mark.asyncio
async def test_the_answer_is_found_behind_what_libraries_print(tmp_path: Path) -> None:
    noisy = "print('amdsmi says hello')\n" + GOOD
    answer = await Detector(command=python_with(tmp_path, noisy)).ask("cuda", 20)
    assert not isinstance(answer, Unavailable)


@pytest.mark.asyncio
async def test_this_machine_is_answered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTENSOR_JOIN_TOKEN", "secret")
    devices = await Detector().accelerators(MEMORY)
    card = has_hardware()
    assert devices or card is False, "a machine that has a card, or may have one, gets an answer"
    for device in devices:
        assert device.unusable is None or len(device.unusable) > 10


@pytest.mark.parametrize(
    ("out", "code", "reason"),
    [
        (b"", 0, "not JSON"),
        (b"[1]", 0, "not JSON"),
        (b"{", 0, "not JSON"),
        (b"{}", 3, "exit 3: last words"),
        (b"", -11, "signal 11 (SIGSEGV)"),
    ],
)
def test_answers_that_are_none(out: bytes, code: int, reason: str) -> None:
    answer = read_answer(out, b"first\nlast words\n", code)
    assert isinstance(answer, Unavailable)
    assert reason in answer.reason


def test_the_probe_refuses_an_unknown_family() -> None:
    done = subprocess.run([*PROBE, "tpu"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 64
    assert "expected one of cuda, rocm, apple, torch, mlx" in done.stderr


def test_the_probe_child_is_light() -> None:
    code = (
        "import sys; from distensor_server.devices.probe import main; main(['cuda']); "
        "print(sorted(set(sys.modules) & {'torch', 'grpc', 'asyncio', 'psutil', 'numpy', 'distensor.core'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.asyncio
async def test_watching_brings_new_readings_and_ends_when_nvml_fails(tmp_path: Path) -> None:
    failing = (
        "from fake_nvml import *\nimport sys\n"
        "class Nvml(FakeNvml):\n"
        "    def nvmlDeviceGetCount(self):\n"
        "        if self.calls.count('nvmlDeviceGetCount') > 0:\n"
        "            raise NVMLError(999, 'Unknown Error')\n"
        "        return super().nvmlDeviceGetCount()\n"
        "sys.modules[__name__] = Nvml()"
    )
    answers: list[Answer] = []
    await asyncio.wait_for(Detector(command=python_with(tmp_path, failing)).watch(CUDA, answers.append), 30)
    first, last = answers
    assert not isinstance(first, Unavailable)
    assert "devices" in first
    assert not isinstance(last, Unavailable)
    assert last["error"]["code"] == 999


class Scripted(Detector):
    """Finds what the test says, one answer after the other."""

    answers: list[Answer]

    def __init__(self, *answers: Answer) -> None:
        object.__setattr__(self, "_answers", list(answers))

    async def accelerators(self, memory: HostMemory) -> tuple[Device, ...]:
        answers: list[Answer] = self._answers  # type: ignore[attr-defined]
        torch = {"version": "2.13.0", "cuda": True}
        return cuda_devices(answers.pop(0) if len(answers) > 1 else answers[0], torch, memory)

    async def watch(self, family: object, on_answer: object) -> None:
        await asyncio.sleep(3600)


class QuickClock:
    """Real time, but nobody sleeps longer than a moment."""

    now = staticmethod(SYSTEM_CLOCK.now)
    monotonic = staticmethod(SYSTEM_CLOCK.monotonic)
    sleep = staticmethod(SYSTEM_CLOCK.sleep)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


CUDA = WATCHED[0]
WEDGED = {"error": {"code": 999, "message": "Unknown Error", "hint": "reboot"}}
FOUND = {"devices": [{"index": 0, "uuid": "GPU-1", "name": "RTX 4090"}]}


@pytest.mark.asyncio
async def test_a_wedged_driver_is_shown_and_looked_for_again_without_a_restart() -> None:
    told: list[tuple[str, str, str]] = []
    inventory = Inventory(
        host=Host(),
        detector=Scripted(WEDGED, WEDGED, FOUND),
        limits=Limits(cpu_workers=1),
        clock=QuickClock(),
        on_event=lambda *event: told.append(event),
        on_change=lambda: None,
    )
    await inventory.detect()
    assert [device.device_id for device in inventory.devices] == ["cuda", "cpu"]
    assert told[0][0] == "warning"
    assert "NVML error 999" in told[0][2]
    task = asyncio.create_task(inventory.keep_up())
    await eventually(lambda: inventory.devices[0].device_id == "GPU-1", "the GPU came back")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [text for _, _, text in told].count(told[0][2]) == 1, "the same state is told once"
    assert told[1][:2] == ("info", "GPU-1")


def test_the_devices_command_prints_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distensor_server", "devices", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = json.loads(done.stdout)["devices"]
    assert rows[-1]["id"] == "cpu"
    assert rows[-1]["memory_total"] > 0
    assert all(isinstance(reason, str) for reason in rows[-1]["unavailable"].values())
