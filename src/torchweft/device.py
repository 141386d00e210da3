"""The device that a command was asked for."""

from __future__ import annotations

import torch

from torchweft.errors import DeviceError

__all__ = ["device_of"]


def device_of(name: str | None) -> torch.device:
    """The device of a name; None is cuda where there is one, else cpu.

    Raises:
        DeviceError: no such device is here.
    """
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if name is None:
        return torch.device(here[-1])
    count = torch.cuda.device_count()
    if name in here or name in [f"cuda:{number}" for number in range(count)]:
        return torch.device(name)
    raise DeviceError(
        f"--device is {name}: it must be one that torch finds here, {' or '.join(here)}. "
        "Pass one of these; `torchweft doctor` says what this machine has."
    )
