"""Functions of tests on several ranks: one pool of processes serves all tests.

    found = run(function, size, *arguments)     # [function(rank, size, group, *arguments)] by rank

`function` stands at the top of a test module, so that the processes find it; `group` is a process
group of the first `size` ranks.  What a rank raises is raised here, with the rank's name.  A pool
that a test broke, or that gave no answer in time, is ended and started anew for the next one.

Ranks are four processes with gloo.  With TORCHWEFT_TEST_RANKS=cuda each has a GPU of this machine
and NCCL: what tests make there stands on it (`tests.rank_devices`), what they return comes back to
the host, and tests of more ranks than GPUs are skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.utils._pytree import tree_map_only

from tests.rank_devices import OnDevice

ON_GPUS = os.environ.get("TORCHWEFT_TEST_RANKS") == "cuda"
HOST = torch.device("cpu")
DEVICE_TYPE = "cuda" if ON_GPUS else "cpu"
SIZE = torch.cuda.device_count() if ON_GPUS else 4
SECONDS = 300
"""How long a test may take on its ranks."""


class RankError(AssertionError):
    """What was raised on a rank."""


def run(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What each of `size` ranks returned, by rank."""
    if size > SIZE:
        pytest.skip(f"{size} ranks need as many GPUs: there are {SIZE}")
    pool = _pool()
    for pipe in pool.pipes[:size]:
        pipe.send((function, size, arguments))
    found, errors = [], []
    for rank, pipe in enumerate(pool.pipes[:size]):
        if not pipe.poll(SECONDS):
            _end()
            raise RankError(f"rank {rank} gave no answer in {SECONDS} s; {errors}")
        result, error = pipe.recv()
        found.append(result)
        errors += [] if error is None else [f"rank {rank}:\n{error}"]
    if errors:
        _end()  # other ranks may still wait for the one that raised
        raise RankError("\n".join(errors))
    return found


class _Pool:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(SIZE)]
        self.pipes = [end for end, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, self.folder.name, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()


@functools.cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(_end)
    return pool


def _end() -> None:
    if _pool.cache_info().currsize:
        pool = _pool()
        for process in pool.processes:
            process.kill()
            process.join()
        pool.folder.cleanup()
        _pool.cache_clear()
        atexit.unregister(_end)


def _serve(rank: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if ON_GPUS else HOST
    if ON_GPUS:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=SECONDS),
    )
    groups = {size: distributed.new_group(list(range(size))) for size in range(1, SIZE + 1)}
    with OnDevice(device) if ON_GPUS else contextlib.nullcontext():
        while True:
            function, size, arguments = _moved(pipe.recv(), device)
            try:
                found = function(rank, size, groups[size], *arguments)
                pipe.send((_moved(found, HOST), None))
            except Exception:  # noqa: BLE001
                pipe.send((None, traceback.format_exc()))


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)
