"""Tasks shared among threads that release the lock: compiled loops of numba."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["share"]

RUNS = 4
"""Runs of tasks for each thread: what a thread that comes late leaves to the others."""


class _Threads:
    """A pool that does not survive a fork: the child makes its own."""

    pool: ThreadPoolExecutor | None = None
    size = 0


os.register_at_fork(after_in_child=lambda: setattr(_Threads, "pool", None))


def share(run: Callable[[int, int], None], tasks: int, threads: int) -> None:
    """Tasks in runs; the caller and the pool's threads take the next one until none is left.

    So a thread that comes late, as when its core is taken by a loop of torch's, holds up nobody.
    """
    if threads == 1 or tasks == 1:
        run(0, tasks)
        return
    if _Threads.pool is None or _Threads.size < threads:
        _Threads.pool, _Threads.size = ThreadPoolExecutor(threads), threads
    number = min(tasks, RUNS * threads)
    ends = [tasks * i // number for i in range(number + 1)]
    counter = itertools.count()  # takes one step at a time, whoever asks

    def work() -> None:
        while (i := next(counter)) < number:
            run(ends[i], ends[i + 1])

    others = [_Threads.pool.submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        if not other.cancel():
            other.result()
