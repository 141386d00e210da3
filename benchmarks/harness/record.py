"""Rows of measurements: one JSON line each, appended, read back with the latest of each kind."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Machine", "Row", "append", "machine", "read"]


@dataclass(frozen=True)
class Machine:
    """Where and with what a row was measured."""

    gpu: str  # the GPU's name, or the processor's
    driver: str
    torch: str
    triton: str
    commit: str
    dirty: bool
    date: str

    @property
    def folder(self) -> str:
        """The folder of this machine's rows: "nvidia_h200"; every processor is "cpu"."""
        return "cpu" if self.driver == "none" else re.sub(r"\W+", "_", self.gpu.lower())


@dataclass(frozen=True)
class Row:
    """One measurement of one candidate: torchweft, or a peer.

    A candidate whose check is red has `bound_ratio` above 1, and if it is ours, no times.
    """

    suite: str
    case: str
    op: str
    mode: str  # of the product: batched, shared, accumulated, ...
    phase: str  # forward, recorded, forward+backward, second
    peer: str  # "torchweft" is ours
    backend: str
    dtype: str
    shape: str
    l2: str  # cold, warm
    ms_p20: float | None  # of the GPU, without waiting for the processor
    ms_p50: float | None
    ms_p80: float | None
    reps: int
    host_us: float | None  # time until an asynchronous call returns; None on the CPU
    bytes_min: int
    flops: int
    roofline_pct: float | None  # floor / ms_p50; None where rates or operations are not known
    peak_mb: float | None  # device memory above the inputs; None on the CPU
    bound_ratio: float  # error / bound against the float64 oracle
    gpu: str
    driver: str
    torch: str
    triton: str
    commit: str
    dirty: bool
    date: str
    protocol: str
    # of one of many calls back to back; None on the CPU, and in old rows
    wall_ms: float | None = None
    right: float | None = None  # share of the elements within the bound; None in old rows
    kernels: int | None = None  # that a call runs; None on the CPU, without CUPTI, in old rows

    @property
    def key(self) -> tuple[str, ...]:
        """What a newer row replaces."""
        return (self.suite, self.case, self.phase, self.peer, self.backend, self.dtype, self.l2)


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a file, one line each, numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{json.dumps(_rounded(asdict(row)))}\n" for row in rows)
    with path.open("ab", buffering=0) as file:
        file.write(lines.encode())  # in one piece: other runs may append to the same file


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in fields.items()}


def read(path: Path) -> list[Row]:
    """The latest row of each kind, in the order in which the kinds first appeared."""
    latest: dict[tuple[str, ...], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Row(**json.loads(line))
        latest[row.key] = row
    return list(latest.values())


def machine(device: torch.device) -> Machine:
    """What this process measures on.

    The commit comes from git; where the code is a copy whose history does not tell, from the
    environment variable TORCHWEFT_COMMIT: what `git describe --always --dirty --exclude '*'`
    printed.
    """
    cuda = device.type == "cuda"
    described = _output("git", "describe", "--always", "--dirty", "--exclude", "*")
    commit = os.environ.get("TORCHWEFT_COMMIT") or described or "unknown"
    return Machine(
        gpu=torch.cuda.get_device_name(device) if cuda else f"{_processor()} x {os.cpu_count()}",
        driver=_driver() if cuda else "none",
        torch=torch.__version__,
        triton=_triton_version(),
        commit=commit.removesuffix("-dirty"),
        dirty=commit == "unknown" or commit.endswith("-dirty"),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str:
    text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0] if text else f"hip {torch.version.hip}"


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _output(*command: str) -> str:
    """What a command prints; nothing where it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
