"""Records as CUDA graphs of torch, and what an error says of a function that is no record."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch

from torchweft.errors import CaptureError, WeftError

__all__ = ["CudaGraphs", "Recorder", "waiting_raises", "waits_are_named"]

T = TypeVar("T")


class Recorder(Protocol):
    """Runs a function as it will be recorded, and records it."""

    def rehearse(self, run: Callable[[], T]) -> T:
        """The results of a run.

        Raises:
            CaptureError: the host waited for the device.
        """

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """A function that replays a run; its results are in the same memory at each replay.

        Raises:
            CaptureError: the run cannot be recorded.
        """


class CudaGraphs:
    """Records on one GPU; they share the memory of what is not handed out.

    Args:
        device: of all arguments.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch.cuda has no types
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, run: Callable[[], T]) -> T:
        """The results of a run on a stream of its own, where waiting is an error."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), waiting_raises(), waits_are_named():
                return run()
        finally:
            current.wait_stream(self._stream)

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """A function that replays the run's graph."""
        current = torch.cuda.current_stream(self._device)
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    results = run()
                except RuntimeError as error:  # of CUDA; the end of the capture raises another
                    cause = error
                    raise
        except RuntimeError as error:
            torch.cuda.set_stream(current)
            self._recover()
            cause = cause or error
            told = isinstance(cause, WeftError | torch.OutOfMemoryError)
            raise cause if told else _not_recorded(cause) from cause

        def replay() -> T:
            graph.replay()
            return results

        return replay

    def _recover(self) -> None:
        """Make torch usable after a capture that failed.

        Torch leaves the memory pool in use, and its generator of random numbers in the state of
        a capture: every random number of the process then raises an error, and so does every
        replay, until another capture ends.
        """
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream):
            torch.zeros(1, device=self._device)  # torch warns of graphs without launches


@contextlib.contextmanager
def waiting_raises() -> Iterator[None]:
    """Torch raises where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def waits_are_named() -> Iterator[None]:
    """Torch's error for a call that waits becomes one that names the line of the user."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeftError) or "synchroniz" not in str(error):
            raise
        raise _not_recorded(error) from error


def _not_recorded(error: BaseException) -> CaptureError:
    """What stopped a record: the last line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    said = (str(error).splitlines() or [type(error).__name__])[0]
    advice = _GRAPH_ALIVE if any(words in said for words in _OTHER_STREAM) else _WAITS
    where = f'{frame.filename}, line {frame.lineno}, "{frame.line}"'
    return CaptureError(f"{where} cannot be recorded: {said}. {advice}")


_WAITS = (
    "A record holds launches alone, and the host must not wait for their results. Move the line "
    "out of the function, or compute with tensors: torch.where instead of if, sizes as arguments "
    "instead of .item(), nonzero() or a boolean mask."
)
_OTHER_STREAM = "legacy stream", "uncaptured work in another stream"
"""CUDA's words for a launch that would wait for a stream which is not recorded."""

_GRAPH_ALIVE = (
    "The gradients of a parameter belong to the stream of an earlier call whose autograd graph is "
    "still alive: something keeps a result of it, such as the loss. Delete it, or keep "
    "loss.detach()."
)


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) + os.sep


_LIBRARIES = _folder("torch"), _folder("torchweft")
