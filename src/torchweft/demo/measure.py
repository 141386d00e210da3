"""Errors against float64, and times of calls that take turns."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.testing.bounds import bound_ratio

__all__ = ["OpError", "interleaved", "machine", "op_errors", "timed", "versions"]

T = TypeVar("T")
Op = Callable[..., Tensor]


class OpError(NamedTuple):
    """How far a result is from its float64 value."""

    name: str
    relative: float  # ‖out − exact‖ / ‖exact‖
    ratio: float  # the worst element: error / its bound


def op_errors(name: str, op: Op, exact: Op, inputs: Sequence[Tensor]) -> list[OpError]:
    """The errors of a bilinear op and of its two gradients, at random upstream gradients.

    The formula itself says how large errors may be: on absolute values it gives the sums that
    bounds scale with, on ones the number of terms of each.
    """
    upstream = torch.randn_like(op(*inputs))
    results = _value_and_gradients(op, inputs, upstream)
    exacts = _value_and_gradients(exact, [a.double() for a in inputs], upstream.double())
    sizes = _value_and_gradients(exact, [a.double().abs() for a in inputs], upstream.double().abs())
    ones = [torch.ones_like(a).double() for a in inputs]
    terms = _value_and_gradients(exact, ones, torch.ones_like(upstream).double())
    parts = ("", ", gradient of its 1st input", ", gradient of its 2nd input")
    return [
        OpError(
            name + part,
            float((out.double() - true).norm() / true.norm()),
            float(bound_ratio(out, true, size, count).max()),
        )
        for part, out, true, size, count in zip(parts, results, exacts, sizes, terms, strict=True)
    ]


def _value_and_gradients(op: Op, inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    leaves = [a.detach().requires_grad_() for a in inputs]
    out = op(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median milliseconds of each call; they take turns, so that load and clock meet them all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(call, device)[1])
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call gives, and its seconds."""
    _synchronize(device)
    begin = time.perf_counter()
    found = call()
    _synchronize(device)
    return found, time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


USED = ("torch", "triton", "numba", "numpy", "matplotlib")
COMPARED = ("e3nn", "pykeops", "spconv")


def versions() -> str:
    """Versions of python, of packages that torchweft uses, and of those it is compared with."""
    found = [f"python {platform.python_version()}"]
    for name in USED + COMPARED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found += [f"no {name}"] if name in USED else []
    return ", ".join(found)


def machine(device: torch.device) -> str:
    """The processor or GPU that the numbers belong to."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    processor = names[0] if names else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    return f"{processor}, {os.cpu_count()} processors, {threads} thread{'s' * (threads > 1)}"
