"""What NVML tells beyond the plain figures: processes, throttling, MIG, and GPUs that go and come back."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import LOST, NOT_IN_LIBRARY, NOT_SUPPORTED, FakeNvml, NVMLError

from distensor.core.reading import Unavailable
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device, Owner, foreign_processes
from distensor_server.devices.nvidia import THROTTLE_WORDS, cuda_devices, refreshed, unknown_devices
from distensor_server.devices.nvml import REOPEN_AFTER, Session, probe_nvml

GIB = 1 << 30
MEMORY = HostMemory(total=64 * GIB, free=60 * GIB)
TORCH = {"version": "2.13.0", "cuda": True, "cuda_build": "13.0"}


def detect(nvml: FakeNvml, proc: Path = Path("/nowhere")) -> tuple[Device, ...]:
    return cuda_devices(probe_nvml(nvml, proc), TORCH, MEMORY)


def machine(root: Path, **names: str) -> Path:
    """A /proc with these processes, as p123='python'."""
    for pid, name in names.items():
        (root / pid[1:]).mkdir()
        (root / pid[1:] / "comm").write_text(f"{name}\n")
    return root


def test_the_fake_has_the_names_and_values_of_the_real_bindings() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name, value in vars(FakeNvml).items():
        if name.startswith("NVML_"):
            assert getattr(pynvml, name) == value, name
        elif name.startswith("nvml"):
            real = inspect.signature(getattr(pynvml, name)).parameters
            asked = [p for p in real.values() if p.default is inspect.Parameter.empty]
            assert len(asked) == len(inspect.signature(value).parameters) - 1, name


def test_throttle_words_are_the_bits_of_the_real_bindings() -> None:
    pynvml = pytest.importorskip("pynvml")
    bits = {v for n, v in vars(pynvml).items() if n.startswith("nvmlClocksThrottleReason") and isinstance(v, int)}
    single = {bit for bit in bits if bit and bit & (bit - 1) == 0}
    assert single == {*THROTTLE_WORDS, 1}


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0, ()), (1, ()), (0x24, ("power limit", "heat")), (0x4001, ("reason 0x4000 of NVML",))],
)
def test_why_a_gpu_is_held_back_is_said_in_words(bits: int, expected: tuple[str, ...]) -> None:
    (device,) = detect(FakeNvml(throttle=bits))
    assert device.throttle == expected


def test_an_older_driver_is_asked_by_the_older_name() -> None:
    nvml = FakeNvml(throttle=4, errors={"nvmlDeviceGetCurrentClocksEventReasons": NOT_IN_LIBRARY})
    assert detect(nvml)[0].throttle == ("power limit",)


def test_processes_are_ours_foreign_or_not_to_be_told(tmp_path: Path) -> None:
    nvml = FakeNvml(compute=((100, 3 * GIB), (300, None)), graphics=((200, GIB), (100, 4 * GIB)))
    (device,) = detect(nvml, machine(tmp_path, p100="python", p200="game [/]"))
    assert not isinstance(device.processes, Unavailable)
    worker, hidden, game = device.processes
    assert (worker.name, worker.type, worker.memory) == ("python", "compute+graphics", 4 * GIB)
    assert (game.name, game.type) == ("game [/]", "graphics")
    assert [p.owner({100}) for p in (worker, hidden, game)] == [Owner.OWN, Owner.UNKNOWN, Owner.FOREIGN]
    assert hidden.memory == Unavailable(reason="not told for each process")
    assert foreign_processes(device, {100}) == (game,)
    assert foreign_processes(device, {100, 200}) == ()


def test_a_driver_that_lists_no_processes_is_not_read_as_nobody() -> None:
    (device,) = detect(FakeNvml(errors={"nvmlDeviceGetComputeRunningProcesses": NOT_SUPPORTED}))
    assert foreign_processes(device, set()) == Unavailable(reason="NVML: not supported")


def sample(pid: int, share: int, at: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=share, timeStamp=at)


def test_the_share_of_each_process_is_that_since_the_last_look() -> None:
    """Figures of https://github.com/Syllo/nvtop/issues/110, where nonsense was shown for processes without samples."""
    nvml = FakeNvml(compute=((7044, GIB), (7180, GIB), (18429, GIB)))
    nvml.samples = [sample(18429, 1, 1623157629331552), sample(7044, 12, 1623157633175692)]
    session = Session(nvml, Path("/nowhere"))

    def shares() -> list[object]:
        return [process["utilization"] for process in session.sample()["devices"][0]["processes"]]

    assert all(isinstance(share, dict) for share in shares()), "the first look has nothing to compare with"
    nvml.samples += [
        sample(7180, 16, 1623157639191912),
        sample(0, 4294967295, 0),
        sample(18429, 1785868, 1723157639191912),
    ]
    assert shares() == [0.0, 0.16, 0.0]
    nvml.samples.clear()
    assert shares() == [0.0, 0.0, 0.0], "no sample since then: nobody used it"


def test_nvml_is_opened_once_and_anew_from_time_to_time() -> None:
    nvml = FakeNvml()
    session = Session(nvml)
    for _ in range(REOPEN_AFTER + 1):
        session.sample()
    assert (nvml.calls.count("nvmlInit"), nvml.calls.count("nvmlShutdown")) == (2, 1)


def test_mig_instances_are_devices_of_their_own() -> None:
    whole, small, large = detect(FakeNvml(name="NVIDIA A100", instances={0: "1g.10gb", 4: "3g.40gb"}))
    assert (whole.device_id, whole.info().slots, whole.fault) == ("GPU-0", 0, False)
    assert "its instances are offered" in (whole.unusable or "")
    assert (small.device_id, small.parent, small.profile) == ("MIG-1g.10gb", "GPU-0", "1g.10gb")
    assert (small.memory_total, small.info().slots, small.temperature_c) == (10 * GIB, 1, 72.0)
    assert isinstance(small.utilization, Unavailable)
    assert (large.profile, large.unusable) == ("3g.40gb", None)


def test_a_gpu_with_mig_and_no_instance_says_what_to_do() -> None:
    (device,) = detect(FakeNvml(instances={}))
    assert (device.slots, device.fault) == (0, True)
    assert "nvidia-smi mig -cgi" in (device.unusable or "")


@pytest.mark.parametrize("where", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTemperature"])
def test_a_gpu_that_is_lost_keeps_its_place_and_comes_back(where: str) -> None:
    nvml = FakeNvml(count=2)
    session = Session(nvml, Path("/nowhere"))
    devices = cuda_devices(session.sample(), TORCH, MEMORY)
    nvml.errors = {(where, 1): LOST}
    well, gone = refreshed(devices, session.sample(), MEMORY)
    assert (well.device_id, well.unusable) == ("GPU-0", None)
    assert (gone.device_id, gone.fault, gone.info().slots) == ("GPU-1", True, 0)
    assert "fallen off the bus" in (gone.unusable or "")
    assert isinstance(gone.temperature_c, Unavailable)
    assert gone.memory_total == 24 * GIB
    nvml.errors = {}
    opened = nvml.calls.count("nvmlInit")
    again = refreshed((well, gone), session.sample(), MEMORY)
    assert nvml.calls.count("nvmlInit") == opened + 1, "only opening NVML again finds a GPU that came back"
    assert [(device.device_id, device.unusable) for device in again] == [("GPU-0", None), ("GPU-1", None)]


def test_a_gpu_that_is_no_longer_listed_is_a_fault() -> None:
    devices = detect(FakeNvml(count=2))
    _, gone = refreshed(devices, probe_nvml(FakeNvml(count=1)), MEMORY)
    assert (gone.device_id, gone.unusable) == ("GPU-1", "NVML does not list it any more")


def test_the_order_of_gpus_after_a_reboot_does_not_matter() -> None:
    """Readings go by UUID: index 0 of this answer is the card that was 1."""
    devices = detect(FakeNvml(count=2))
    answer = probe_nvml(FakeNvml(count=2))
    first, second = answer["devices"]
    second["temperature_c"] = 40.0
    swapped = {"devices": [{**second, "index": 0}, {**first, "index": 1}]}
    assert [d.temperature_c for d in refreshed(devices, swapped, MEMORY)] == [72.0, 40.0]


def test_a_new_device_is_noticed() -> None:
    devices = detect(FakeNvml())
    assert not unknown_devices(devices, probe_nvml(FakeNvml()))
    assert unknown_devices(devices, probe_nvml(FakeNvml(count=2)))
    assert unknown_devices(devices, probe_nvml(FakeNvml(instances={0: "1g.10gb"})))
    assert not unknown_devices(devices, probe_nvml(FakeNvml(count=2, errors={("nvmlDeviceGetHandleByIndex", 1): LOST})))
    assert not unknown_devices(devices, Unavailable(reason="silent"))


def test_closing_survives_a_driver_that_is_gone() -> None:
    nvml = FakeNvml(errors={"nvmlShutdown": (999, "Unknown Error")})
    session = Session(nvml)
    session.sample()
    session.close()
    with pytest.raises(NVMLError):
        nvml.nvmlShutdown()


def test_gpus_without_a_uuid_are_not_mixed_up() -> None:
    without = {"nvmlDeviceGetUUID": NOT_SUPPORTED}
    assert [device.unusable for device in detect(FakeNvml(errors=without))] == [None]
    for device in detect(FakeNvml(count=2, errors=without)):
        assert "cannot be told from the other GPUs: NVML: not supported" in (device.unusable or "")
