"""The torch device of an assignment. Never a silent fall back to the CPU."""

from __future__ import annotations

import os

import torch

from distensor.core import DeviceId
from distensor.core.control import DeviceKind
from distensor.core.errors import ConfigError, UnsupportedOptionError

BY_UUID = ("GPU-", "MIG-")
"""A GPU whose driver gives no UUID is offered only where it is the only one, so there is nothing to choose."""


def torch_device(kind: DeviceKind, device_id: DeviceId) -> torch.device:
    """The device, or an error that says why it cannot be used.

    A CUDA device is chosen by its UUID through CUDA_VISIBLE_DEVICES, so that a reboot cannot swap two cards.
    """
    match kind:
        case DeviceKind.CPU:
            return torch.device("cpu")
        case DeviceKind.CUDA:
            if device_id.startswith(BY_UUID):
                os.environ["CUDA_VISIBLE_DEVICES"] = device_id
            if not torch.cuda.is_available():
                raise ConfigError(
                    f"device {device_id!r}: this torch ({torch.__version__}) sees no CUDA device of that id"
                )
            return torch.device("cuda", 0)
        case DeviceKind.ROCM:
            # The supervisor has set ROCR_VISIBLE_DEVICES to its UUID; torch calls the devices of ROCm 'cuda' too.
            if not (torch.version.hip and torch.cuda.is_available()):
                raise ConfigError(f"device {device_id!r}: torch {torch.__version__} has no usable ROCm here")
            return torch.device("cuda", 0)
        case DeviceKind.MPS:
            if not torch.backends.mps.is_available():
                raise ConfigError(f"device {device_id!r}: torch {torch.__version__} has no usable Metal (MPS) here")
            return torch.device("mps")
        case DeviceKind.MLX | DeviceKind.AGGREGATOR:  # the second is room for no program at all
            raise UnsupportedOptionError(
                f"device {device_id!r}: the {kind.value} backend is not implemented in this version"
            )
