"""The clock of a GPU's processors while calls run, by nvidia-smi in a process beside this one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import torch

__all__ = ["sm_clock"]

EVERY_MS = 200
"""Time between samples: seldom enough that calls do not feel them."""


@contextlib.contextmanager
def sm_clock(device: torch.device) -> Iterator[Callable[[float], int]]:
    """Sample it inside; `least(begin)` is the least in MHz since `begin` of time.perf_counter().

    It is 0 where there are no samples: no GPU, or no nvidia-smi that knows it.
    """
    samples: list[tuple[float, int]] = []

    def least(begin: float) -> int:
        return min((mhz for at, mhz in samples if at >= begin), default=0)

    path = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if path is None:
        yield least
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    terminal, lines = os.openpty()  # to which programs write line by line
    query = ["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}"]
    process = subprocess.Popen([path, f"--id=GPU-{uuid}", *query], stdout=lines)
    os.close(lines)
    reader = threading.Thread(target=_read, args=(terminal, samples))
    reader.start()
    try:
        yield least
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _read(terminal: int, samples: list[tuple[float, int]]) -> None:
    """Numbers, one a line, until the process ends."""
    with open(terminal) as lines, contextlib.suppress(OSError):  # a closed terminal is an error
        samples.extend((time.perf_counter(), int(line)) for line in lines if line.strip().isdigit())
