"""Functions of tests on several ranks: one pool of processes serves all tests.

    found = run(function, size, *arguments)     # [function(rank, size, group, *arguments)] by rank

`function` stands at the top of a test module, so that the processes find it; `group` is a process
group of the first `size` ranks.  What a rank raises is raised here, with the rank's name.  A pool
that a test broke, or that gave no answer in time, is ended and started anew for the next one.

Ranks are four processes with gloo.  With TORCHWEFT_TEST_RANKS=cuda each has a GPU of this machine
and NCCL: what tests make there stands on it (`tests.rank_devices`), what they return comes back to
the host, and tests of more ranks than GPUs are skipped.  With TORCHWEFT_TEST_RANKS=shared four
ranks share the GPUs that there are, with gloo, since NCCL refuses two ranks on a GPU.
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
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing
from torch.utils._pytree import tree_map_only

from tests.rank_devices import OnDevice

KIND = os.environ.get("TORCHWEFT_TEST_RANKS", "cpu")
HOST = torch.device("cpu")
ON_GPUS = KIND in ("cuda", "shared")
DEVICE_TYPE = "cuda" if ON_GPUS else "cpu"
SIZE = torch.cuda.device_count() if KIND == "cuda" else 4
IMPORTED = [
    "pytest",
    *(f"torchweft.{name}" for name in ("clifford", "distributed", "o3", "voxels")),
]
"""What the processes find imported: importing it takes them longer than most tests."""

SECONDS = 300
"""How long a test may take on its ranks."""

if ON_GPUS:  # values of tables are checked there too, as on the CPU
    os.environ["TORCHWEFT_CHECK"] = "1"


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
        try:
            result, error = pipe.recv()
        except EOFError as gone:
            _end()
            raise RankError(f"the process of rank {rank} ended; {errors}") from gone
        found.append(result)
        errors += [] if error is None else [f"rank {rank}:\n{error}"]
    if errors:
        _end()  # other ranks may still wait for the one that raised
        raise RankError("\n".join(errors))
    return found


def in_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with gradients of gradients in one order on every rank: see `Halo`."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return function(*args, **options)

    return called


def ended(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[str]:
    """What each rank wrote until its process, with a default group of its own, ended.

    Args:
        function: called with rank, size and the arguments; it may end its process.
        size: number of ranks.
        folder: for the files that they write to.
        arguments: more of them.
    """
    processes = [
        _context().Process(target=_alone, args=(function, rank, size, folder, *arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            raise RankError(f"rank {rank} did not end in {SECONDS} s")
    return [(folder / str(rank)).read_text() for rank in range(size)]


def _alone(
    function: Callable[..., Any], rank: int, size: int, folder: Path, *arguments: Any
) -> None:
    file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _initialize(rank, size, folder)
    function(rank, size, *arguments)


def _initialize(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if KIND == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )


def _context() -> Any:
    if ON_GPUS:  # CUDA does not survive a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


class _Pool:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = _context()
        ends = [context.Pipe() for _ in range(SIZE)]
        self.pipes = [end for end, _ in ends]
        self.processes = [
            context.Process(target=_serve, args=(rank, Path(self.folder.name), there), daemon=True)
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


def _serve(rank: int, folder: Path, pipe: Any) -> None:
    device = HOST
    if ON_GPUS:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    _initialize(rank, SIZE, folder)
    groups = {size: distributed.new_group(list(range(size))) for size in range(1, SIZE + 1)}
    with OnDevice(device) if ON_GPUS else contextlib.nullcontext():
        while True:
            function, size, arguments = _moved(pipe.recv(), device)
            try:
                found = function(rank, size, groups[size], *arguments)
                pipe.send((_moved(found, HOST), None))
            except (Exception, pytest.fail.Exception):  # noqa: BLE001
                pipe.send((None, traceback.format_exc()))


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)
