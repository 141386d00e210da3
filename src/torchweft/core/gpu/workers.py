"""Processes that compile kernels side by side.

Python's lock is held while a kernel's syntax tree is walked, a third of its compilation, so threads
of one process are not enough for the tens of kernels of a model.  A worker is `worker.py` in a
Python of its own: it imports Triton, but no torch, and has no CUDA.  Nothing is forked, so neither
threads nor a `__main__` of the caller matter.  Workers end with their work, or where the pipe to
their caller ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing import spawn
from typing import Any, NamedTuple

from torchweft.core.gpu.compiler import Code
from torchweft.core.printing.modules import Jitted

__all__ = ["READY", "Job", "Workers", "most_workers"]

MOST_WORKERS = 16
"""Processes of 200 MB each; more would wait for the longest kernel."""

BEGIN = "import sys; sys.path[:] = {path!r}; from torchweft.core.gpu.worker import serve; serve()"

READY = b"\n"
"""What a process writes once it has imported Triton."""


class Job(NamedTuple):
    """A kernel to compile.

    Args:
        kernel: makes its function.
        arguments: all its arguments, pointers in place of tensors.
        options: num_warps, num_stages and others of Triton.
        device: architecture, as "sm_90".
    """

    kernel: Callable[[], Jitted]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    device: str


@functools.cache
def most_workers() -> int:
    """Processors of the host that this process may use for workers; at most MOST_WORKERS."""
    own = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(MOST_WORKERS, own)


class _Waiting(NamedTuple):
    """A job in the queue, which is sorted; the last entry of each process holds none."""

    order: float
    number: int
    job: bytes
    future: Future[Code | None] | None


class Workers:
    """As many processes as there are jobs and processors.

    The answer to a job is its code; None where the process could not compile it, or ended: who
    needs the code then compiles it in this process, and sees the error.
    """

    def __init__(self) -> None:
        self._jobs: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting = self.started = 0

    def submit(self, job: Job, work: float) -> Future[Code | None]:
        """Begin to compile a job.

        Args:
            job: the kernel.
            work: jobs of more work are compiled first: the last one should not be the longest.
        """
        future: Future[Code | None] = Future()
        self._jobs.put(_Waiting(-work, next(self._numbers), pickle.dumps(job), future))
        with self._lock:
            self._waiting += 1
            more = self.started < min(self._waiting, most_workers())
            self.started += more
        if more:
            threading.Thread(target=self._serve, daemon=True).start()
        return future

    def close(self) -> None:
        """Let the processes end after the jobs that were submitted."""
        for _ in range(self.started):
            self._jobs.put(_Waiting(math.inf, next(self._numbers), b"", None))

    def _serve(self) -> None:
        process = _ready()
        while (waiting := self._jobs.get()).future is not None:
            code = None
            try:
                with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                    process = process or _ready()
                    code = _answer(process, waiting.job) if process else None
            finally:
                waiting.future.set_result(code)
            with self._lock:
                self._waiting -= 1
            if code is None:
                _end(process)
                process = None
        _end(process)


def _started() -> subprocess.Popen[bytes]:
    program = spawn.get_executable()
    if not program:
        raise FileNotFoundError("no Python is known that a process could run")
    command = [os.fsdecode(program), "-c", BEGIN.format(path=sys.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ready() -> subprocess.Popen[bytes] | None:
    """A process that has imported Triton: a job that it takes begins at once.

    None if it could not be started.
    """
    process = None
    with contextlib.suppress(OSError):
        process = _started()
        assert process.stdout is not None
        if process.stdout.read(1) == READY:
            return process
    _end(process)
    return None


def _answer(process: subprocess.Popen[bytes], job: bytes) -> Code | None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job)
    process.stdin.flush()
    code: Code | None = pickle.load(process.stdout)
    return code


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        with contextlib.suppress(OSError):
            process.communicate()  # ends the input, and waits
