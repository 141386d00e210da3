"""Kernels of a whole call, compiled before it runs.

The first call of a model meets its kernels one after the other.  So the call is first made without
launches: each new kernel is begun in another process instead, torch's own operations run, and
results are whatever memory holds.  The call that follows then waits for the last of them at most.

Only this thread, and the threads of autograd that work for it, leave launches out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torchweft.core import private
from torchweft.core.gpu.workers import Workers, most_workers

__all__ = ["compile_ahead", "noting"]

NOTING = "torchweft: launches are noted"


def noting() -> Workers | None:
    """What compiles new kernels of this thread in place of launches; None: they are launched."""
    workers: Workers | None = private.stashed(NOTING)
    return workers


def compile_ahead(call: Callable[[], object]) -> None:
    """Make a call without the launches of new kernels, which are compiled side by side.

    Nothing may be kept of what it computes.  Where torch refuses such numbers, the call ends there:
    kernels behind are compiled as they are met.

    Args:
        call: is made once; not at all where there is one processor.
    """
    if most_workers() < 2 or noting() is not None:
        return
    workers = Workers()
    private.stash(NOTING, workers)
    try:
        with contextlib.suppress(RuntimeError):
            call()
    finally:
        private.stash(NOTING, None)
        workers.close()
