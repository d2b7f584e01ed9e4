"""RES-07: a device that computes wrongly is found by name before it is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distensor.core.control import DeviceKind
from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable
from distensor_server.devices.answers import Answer
from distensor_server.devices.detect import Detector, verdict, visible
from distensor_server.devices.host import HostMemory
from distensor_server.devices.model import Device

torch = pytest.importorskip("torch")


class WrongSilu(torch.autograd.Function):  # type: ignore[misc]
    """As the kernel of pytorch issue 175188: right for contiguous inputs, twice the gradient for permuted ones."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(context: Any, upstream: Any) -> Any:
        (x,) = context.saved_tensors
        sigmoid = torch.sigmoid(x)
        right = upstream * sigmoid * (1 + x * (1 - sigmoid))
        return right if x.is_contiguous() else 2 * right


def nan_forward(x: Any) -> Any:
    return torch.where(x > 2, torch.full_like(x, float("nan")), torch.tanh(x))


def missing(_x: Any) -> Any:
    raise RuntimeError("aten::softmax is not implemented for this device\nmore lines")


def test_the_cpu_agrees_with_itself() -> None:
    from distensor_server.devices.selftest import faults

    assert faults("cpu") == []


def test_a_wrong_gradient_for_permuted_inputs_is_named() -> None:
    from distensor_server.devices.selftest import OPERATIONS, faults

    found = faults("cpu", {**OPERATIONS, "silu": WrongSilu.apply})
    assert [text.partition(":")[0] for text in found] == [
        f"silu backward, {layout} input" for layout in ("permuted", "transposed", "strided", "expanded")
    ]
    assert "differs from the CPU by" in found[0]
    reason = verdict({"faults": found})
    assert reason is not None
    assert reason.startswith("it computes wrongly: silu backward, permuted input")
    assert "(and 3 more)" in reason


def test_what_is_no_number_and_what_is_lacking_are_faults() -> None:
    from distensor_server.devices.selftest import LAYOUTS, OPERATIONS, faults

    found = faults("cpu", {**OPERATIONS, "tanh": nan_forward, "softmax": missing})
    assert "tanh forward, contiguous input: differs from the CPU by nan" in found[0]
    assert found[-1] == "softmax, expanded input: aten::softmax is not implemented for this device"
    assert len([text for text in found if text.startswith("softmax")]) == len(LAYOUTS)


def test_a_device_that_others_fill_is_not_called_wrong() -> None:
    from distensor_server.devices.selftest import OPERATIONS, faults

    def full(_x: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        faults("cpu", {**OPERATIONS, "silu": full})


NVML = {"devices": [{"index": 0, "uuid": "GPU-7", "name": "RTX 4090", "memory_total": 24 << 30}]}
TORCH = {"version": "2.13.0", "cuda": True, "cuda_build": "13.0"}


class Answering(Detector):
    """Answers its children's questions from a list; what was asked is kept."""

    def __init__(self, *selftests: Answer) -> None:
        super().__init__(platform="linux", root=Path("/nowhere"))
        object.__setattr__(self, "_selftests", list(selftests))
        object.__setattr__(self, "asked", [])

    async def ask(self, family: Any, seconds: float, variables: Any = None) -> Answer:
        if family in ("cuda", "torch"):
            return {"cuda": NVML, "torch": TORCH}[family]
        self.asked.append((family, variables))  # type: ignore[attr-defined]
        answers: list[Answer] = self._selftests  # type: ignore[attr-defined]
        return answers.pop(0)


MEMORY = HostMemory(total=1 << 36, free=1 << 35)


@pytest.mark.asyncio
async def test_an_accelerator_is_offered_after_its_test_and_tested_once() -> None:
    detector = Answering({"faults": []})
    for _ in range(2):
        (device,) = await detector.accelerators(MEMORY)
        assert (device.unusable, device.info().slots) == (None, 1)
    assert detector.asked == [(("selftest", "cuda"), {"CUDA_VISIBLE_DEVICES": "GPU-7"})]  # type: ignore[attr-defined]


@pytest.mark.asyncio
async def test_an_accelerator_that_computes_wrongly_is_not_offered_and_one_that_crashes_is_tried_again() -> None:
    wrong = {"faults": ["silu backward, permuted input: differs from the CPU by 1.1 where values reach 1"]}
    detector = Answering(Unavailable(reason="the probe ended with signal 11 (SIGSEGV)"), wrong)
    (crashed,) = await detector.accelerators(MEMORY)
    assert crashed.unusable == "the self-test failed: the probe ended with signal 11 (SIGSEGV)"
    for _ in range(2):
        (device,) = await detector.accelerators(MEMORY)
        assert "silu backward, permuted input" in (device.unusable or "")
        assert (device.fault, device.info().slots) == (True, 0)


@pytest.mark.parametrize(
    ("kind", "uuid", "expected"),
    [
        (DeviceKind.CUDA, "MIG-1", {"CUDA_VISIBLE_DEVICES": "MIG-1"}),
        (DeviceKind.ROCM, "GPU-a3", {"ROCR_VISIBLE_DEVICES": "GPU-a3"}),
        (DeviceKind.ROCM, Unavailable(reason="no id"), {}),
        (DeviceKind.CPU, "CPU-1", {}),
    ],
)
def test_a_process_sees_its_device_by_uuid(kind: DeviceKind, uuid: Any, expected: dict[str, str]) -> None:
    device = Device(device_id=DeviceId("x"), kind=kind, name="x", slots=1, uuid=uuid)
    assert visible(device) == expected
