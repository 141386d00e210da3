"""Hardware counters of kernels, as Nsight Compute prints them, and their tables.

A file `<machine>/counters.json` is written by `benchmarks/counters.py`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.markdown import short, table
from torchweft.errors import WeftError

__all__ = ["METRICS", "busy", "counters_section", "kernels_of"]


class Metric(NamedTuple):
    """A number of a kernel: its name in Nsight Compute, a factor, and the unit that gives."""

    name: str
    factor: float
    unit: str


METRICS = {
    "time": Metric("gpu__time_duration.sum", 1e-3, "µs"),
    "tensor cores": Metric(
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", 1, "%"
    ),
    "L2": Metric("lts__t_sectors.avg.pct_of_peak_sustained_elapsed", 1, "%"),
    "DRAM": Metric("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1, "%"),
    "L2 to processors": Metric("l1tex__m_xbar2l1tex_read_bytes.sum", 1e-9, "GB"),
    "DRAM to L2": Metric("dram__bytes_read.sum", 1e-9, "GB"),
    "clock": Metric("sm__cycles_elapsed.avg.per_second", 1e-9, "GHz"),
}
"""What is counted; percentages are of the peak, of tensor cores while a processor is active."""

LEAST_SHARE = 0.03
"""Kernels that take less of a case's time are left out."""

_TEXT = """## Hardware counters

By Nsight Compute (`benchmarks/counters.py`), of the kernels of one pass forward and backward, in
the order of their launches, each run alone with an empty cache. *tensor cores*, *L2* and *DRAM*:
percent of the peak. *L2 to processors* and *DRAM to L2*: what is read. *clock*: it is not fixed,
and falls where power limits it.
"""


def kernels_of(printed: str) -> list[dict[str, Any]]:
    """The kernels in what `ncu --csv --page raw --print-units base` printed.

    Raises:
        WeftError: there is no table.
    """
    begin = re.search(r'^"ID",', printed, re.MULTILINE)
    if begin is None:
        raise WeftError(f"ncu printed no table of counters, but:\n{printed[-2000:]}")
    head, _, *rows = csv.reader(printed[begin.start() :].splitlines())
    kernels = []
    for row in rows:
        if len(row) < len(head):
            break  # what a program prints behind the table
        fields = dict(zip(head, row, strict=True))
        numbers = {
            shown: float(fields[metric.name].replace(",", "")) * metric.factor
            for shown, metric in METRICS.items()
        }
        kernels.append({"kernel": fields["Kernel Name"], **numbers})
    whole = sum(kernel["time"] for kernel in kernels)
    return [kernel for kernel in kernels if kernel["time"] >= LEAST_SHARE * whole]


def counters_section(folder: Path) -> str:
    """A part of docs/performance.md, from a folder of results; empty without any."""
    parts = []
    for found in _found(folder):
        head = [f"{name}, {metric.unit}" for name, metric in METRICS.items()]
        lines = [
            [case["case"], kernel["kernel"], *(short(kernel[name]) for name in METRICS)]
            for case in found["cases"].values()
            for kernel in case["kernels"]
        ]
        commits = sorted({case["commit"] for case in found["cases"].values()})
        lead = f"### Counters, {found['gpu']}\n\nCommits {', '.join(commits)}.\n"
        parts.append(f"{lead}\n{table(['case', 'kernel', *head], lines)}")
    return "\n".join([_TEXT, *parts]) if parts else ""


def busy(folder: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """By GPU, suite and case, for each phase: a kernel, and how busy it keeps the machine.

    Forward it is the first kernel, with backward the longest of all.
    """
    return {
        (found["gpu"], case["suite"], case["case"]): {
            "forward": _busy(case["kernels"][0]),
            "forward+backward": _busy(max(case["kernels"], key=lambda kernel: kernel["time"])),
        }
        for found in _found(folder)
        for case in found["cases"].values()
    }


def _busy(kernel: Mapping[str, Any]) -> str:
    used = ", ".join(f"{name} {kernel[name]:.0f} %" for name in ("tensor cores", "L2", "DRAM"))
    return f"{kernel['kernel']}: {used}"


def _found(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("*/counters.json"), reverse=True)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
