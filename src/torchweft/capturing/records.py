"""Calls of one signature: the first runs as it is, the second is rehearsed, the third is recorded.

Each call has the effects of one call of the function.  The first makes what is made once (states of
optimizers, plans of constants, compiled kernels) and tells the shapes of the results.  The second
runs in the memory of the record, where waiting for the device is an error; with sizes it runs
without padding too, and the results must agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torchweft.capturing.buffers import Buffers
from torchweft.capturing.comparison import Written, check_agreement
from torchweft.capturing.gradients import Gradients, backward_noted, leaves_of
from torchweft.capturing.graphs import Recorder
from torchweft.capturing.layout import Layout
from torchweft.capturing.leaves import flatten, unflatten
from torchweft.capturing.random_numbers import generator_states, random_numbers_fixed
from torchweft.core.collectives import Group, everywhere
from torchweft.core.recorded import Run
from torchweft.errors import CaptureError

__all__ = ["Record"]

Function = Callable[..., Any]


class Record:
    """The record of a function for arguments of one signature.

    Args:
        function: what is recorded.
        structure: how leaves form the arguments.
        layout: what varies in the leaves.
        recorder: makes records.
        least: rows that each size has room for at least.
    """

    def __init__(
        self, function: Function, structure: Any, layout: Layout, recorder: Recorder, least: Any
    ) -> None:
        self._function, self._structure = function, structure
        self._layout, self._recorder, self._least = layout, recorder, least
        self._buffers: Buffers | None = None
        self._replay: Callable[[], list[Any]] | None = None
        self._kept: list[Any] = []
        self._gradients = Gradients(())
        self._results: Any = None  # their structure
        self._first: tuple[tuple[int, ...], list[Any]] | None = None  # lengths, shapes of results
        self._cuts: list[tuple[int | None, ...]] = []
        self._groups: list[Group] = []  # of the ranks that a function with sizes exchanges with

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results, as copies."""
        lengths = self._layout.lengths(leaves)
        if self._first is None:
            found = self._run(_copies(leaves))
            self._first = lengths, [getattr(t, "shape", None) for t in found]
            return self._handed_out(found)
        if self._buffers is None or not self._fits(lengths, self._buffers.rooms):
            return self._rehearsed(leaves, lengths)
        self._buffers.write(leaves, lengths)
        if self._replay is None:
            buffers = self._buffers
            with self._gradients.noted():
                self._replay = self._recorder.record(lambda: self._run_in(buffers, recording=True))
        self._gradients.put_in_place()
        return self._handed_out(self._cut(self._replay(), lengths))

    def _fits(self, lengths: tuple[int, ...], rooms: Sequence[int]) -> bool:
        """Whether there is room, also on the ranks that the function exchanges with."""
        return everywhere(self._layout.fits(lengths, rooms), self._groups)

    def _rehearsed(self, leaves: Sequence[Any], lengths: tuple[int, ...]) -> Any:
        before = self._least if self._buffers is None else self._buffers.rooms
        rooms = self._layout.rooms(lengths, before)
        if self._buffers is not None:
            given = self._layout.shown(lengths)
            if self._layout.fits(lengths, before):
                given = "sizes on another rank"
            warnings.warn(
                f"{given} do not fit the room for {self._layout.shown(before)}: recorded anew with "
                f"room for {self._layout.shown(rooms)}. Pass larger examples or factors.",
                stacklevel=4,
            )
        self._replay = self._buffers = None  # frees the memory of the record
        buffers = Buffers(self._layout, leaves, rooms)
        buffers.write(leaves, lengths)
        if not rooms:
            found = self._recorder.rehearse(lambda: self._run_in(buffers))
        else:
            found = self._compared(leaves, buffers, lengths)
        self._buffers = buffers
        return self._handed_out(found)

    def _compared(
        self, leaves: Sequence[Any], buffers: Buffers, lengths: tuple[int, ...]
    ) -> list[Any]:
        """The results of a call without padding, to which those with padding are held."""
        device = _device_of(leaves)
        before = generator_states(device)
        with Written() as written:
            found = plain = self._run(_copies(leaves))
        self._groups = list(written.groups.values())
        draws = before != generator_states(device)
        with random_numbers_fixed() if draws else nullcontext():
            if draws:
                with written.undone(), self._gradients.aside():
                    plain = self._run(_copies(leaves))
            with written.undone(), self._gradients.aside():
                padded = self._recorder.rehearse(lambda: self._run_in(buffers))
        rooms = self._layout.shown(buffers.rooms)
        try:
            self._cuts = self._cuts_of(padded, buffers.rooms)
            check_agreement(self._cut(padded, lengths), plain, leaves, rooms)
        except CaptureError:
            everywhere(False, self._groups)
            raise
        if not everywhere(True, self._groups):
            raise CaptureError("a result differs with padding on another rank: see its error.")
        return found

    def _run_in(self, buffers: Buffers, recording: bool = False) -> list[Any]:
        """The same in the memory of a record."""
        return self._run(buffers.leaves, Run(recording, buffers.leaves, buffers.notes))

    def _run(self, leaves: Sequence[Any], run: Run | None = None) -> list[Any]:
        """The leaves of the results, detached."""
        run = Run(arguments=leaves) if run is None else run
        with run, self._only_read(leaves), backward_noted() as called:
            arguments = unflatten(leaves, self._structure)
            found, self._results = flatten(self._function(*arguments))
        self._kept = run.kept
        if not run.recording:
            differentiated = {id(t): t for t in (*leaves_of(found), *called)}
            for t in leaves:
                differentiated.pop(id(t), None)
            self._gradients = Gradients(list(differentiated.values()))
        device = _device_of(leaves)
        for i, t in enumerate(found):
            if isinstance(t, Tensor) and t.device != device:
                raise CaptureError(
                    f"result {i} is on {t.device} but the arguments are on {device}: a record "
                    "holds launches only. Return tensors on the arguments' device."
                )
        return [t.detach() if isinstance(t, Tensor) else t for t in found]

    @contextmanager
    def _only_read(self, leaves: Sequence[Any]) -> Iterator[None]:
        tensors = {n: t for n, t in enumerate(leaves) if isinstance(t, Tensor)}
        versions = {}
        for n, t in tensors.items():
            t.grad = None
            versions[n] = t._version
        yield
        for n, t in tensors.items():
            if t._version != versions[n]:
                raise CaptureError(
                    f"the function writes to its argument {self._layout.names[n]} in place: a "
                    "record has a copy of each argument, so the caller's would stay unchanged. "
                    "Return the new values, or write to a tensor that is no argument."
                )

    def _cuts_of(self, padded: Sequence[Any], rooms: Sequence[int]) -> list[tuple[int | None, ...]]:
        """The size of each dimension of each result that varies."""
        assert self._first is not None
        lengths, shapes = self._first
        cuts = []
        for i, (t, shape) in enumerate(zip(padded, shapes, strict=True)):
            found: list[int | None] = []
            for dim, n in enumerate(t.shape if isinstance(t, Tensor) else ()):
                size = rooms.index(n) if n in rooms else None
                if n != shape[dim] and (size is None or shape[dim] != lengths[size]):
                    raise CaptureError(
                        f"dimension {dim} of result {i} has {shape[dim]} rows without padding and "
                        f"{n} with ({self._layout.shown(rooms)}): it must be a size, so that "
                        "padding can be cut off. Return such a result, e.g. (atoms, 3) instead of "
                        "(3 · atoms,)."
                    )
                found.append(None if n == shape[dim] else size)
            cuts.append(tuple(found))
        return cuts

    def _cut(self, results: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
        """Results without padding."""
        if not lengths:
            return list(results)
        found = []
        for t, cut in zip(results, self._cuts, strict=True):
            for dim, size in enumerate(cut):
                t = t if size is None else t.narrow(dim, 0, lengths[size])
            found.append(t)
        return found

    def _handed_out(self, results: Sequence[Any]) -> Any:
        copies = [t.clone() if isinstance(t, Tensor) else t for t in results]
        return unflatten(copies, self._results)


def _device_of(leaves: Sequence[Any]) -> torch.device:
    return next(t.device for t in leaves if isinstance(t, Tensor))


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """Arguments that the function may keep."""
    with torch.inference_mode(False):
        return [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
