"""A memory and race checker for interpreted kernels: call `install()` after the interpreter's.

A launch then raises `MemoryFaultError` when
- an active lane loads, stores or updates outside every tensor that the launch was given, and
  outside of those that it reaches by addresses in a table (`reaching`),
- two lanes of one store hit the same address,
- two programs store to the same cell,
- a program loads a cell that another program stored: its result depends on their order.

A tensor's extent is that of the view, so a lane that leaves a slice but stays inside its storage
is found.  Not found: plain loads of cells that others update atomically, reads through an alias
in another dtype, and anything inside a tensor that is legal but wrong.  About 20 % more time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["MemoryFaultError", "install", "reaching"]

Builder: Any = interpreter.InterpreterBuilder
Executor: Any = interpreter.GridExecutor
Program = tuple[int, int, int]


class MemoryFaultError(AssertionError):
    """An access that a GPU would perform silently: the kernel, the access and the program."""


def install() -> None:
    """Check every interpreted launch of this process; a second call does nothing."""
    if getattr(Builder, "_torchweft_sanitized", False):
        return
    Builder._torchweft_sanitized = True
    _watch_launches()
    _watch_loads()
    _watch_stores()
    _watch_atomics()


@contextlib.contextmanager
def reaching() -> Iterator[list[torch.Tensor]]:
    """A list of further tensors that launches may touch: kernels read their addresses."""
    yield _Launch.reached
    _Launch.reached.clear()


class _Launch:
    """What the running launch may touch, and which program stored which cell."""

    name: str = ""
    extents: np.ndarray = np.empty((0, 2), dtype=np.uint64)
    """[begin, end) of each tensor, sorted; tensors that overlap are one."""
    origins: np.ndarray = np.empty(0, dtype=np.uint64)
    """For each extent, its begin minus the position of its first byte in `writer`."""
    writer: np.ndarray = np.empty(0, dtype=np.int32)
    """The number of the program that stored a cell, at the cell's first byte; 0: none did."""
    programs: ClassVar[dict[Program, int]] = {}
    reached: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def start(cls, name: str, arguments: Iterable[object]) -> None:
        merged: list[list[int]] = []
        for begin, end in sorted(extent for argument in arguments for extent in _extents(argument)):
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        cls.name = name
        cls.extents = np.array(merged, dtype=np.uint64).reshape(-1, 2)
        sizes = cls.extents[:, 1] - cls.extents[:, 0]
        cls.origins = cls.extents[:, 0] - (np.cumsum(sizes, dtype=np.uint64) - sizes)
        cls.writer = np.zeros(int(sizes.sum()), dtype=np.int32)
        cls.programs = {}

    @classmethod
    def number(cls, program: Program) -> int:
        """Programs are numbered from 1, in the order of their first store."""
        return cls.programs.setdefault(program, len(cls.programs) + 1)

    @classmethod
    def others(cls, cells: np.ndarray, program: Program) -> Program | None:
        """A program other than this one that stored one of the cells."""
        writers = cls.writer[cells]
        other = writers[(writers != 0) & (writers != cls.programs.get(program, 0))]
        return list(cls.programs)[int(other[0]) - 1] if other.size else None

    @classmethod
    def check(
        cls, pointers: Any, mask: Any, itemsize: int, access: str, program: Program
    ) -> np.ndarray:
        """Places in `writer` of the active lanes, all of them inside one of the tensors."""
        addresses = np.asarray(pointers.data).astype(np.uint64)
        active = np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)
        addresses = addresses[active]
        if not addresses.size:
            return np.empty(0, dtype=np.int64)
        if not len(cls.extents):
            raise MemoryFaultError(f"{cls.name}: {access}, but every tensor of the launch is empty")
        home = np.searchsorted(cls.extents[:, 0], addresses, side="right").astype(np.int64) - 1
        end = cls.extents[np.maximum(home, 0), 1]
        outside = (home < 0) | (addresses + np.uint64(itemsize) > end)
        if outside.any():
            raise MemoryFaultError(
                f"{cls.name}: {access} out of bounds in {int(outside.sum())} of {addresses.size} "
                f"active lanes of program {program}"
            )
        places: np.ndarray = (addresses - cls.origins[home]).astype(np.int64)
        return places


def _extents(argument: object) -> Iterable[tuple[int, int]]:
    """The [begin, end) addresses of the tensors in an argument of a launch."""
    if isinstance(argument, torch.Tensor):
        if argument.numel():
            strides = zip(argument.shape, argument.stride(), strict=True)
            span = 1 + sum((size - 1) * stride for size, stride in strides)
            begin = argument.data_ptr()
            yield begin, begin + span * argument.element_size()
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _extents(part)
    elif hasattr(argument, "base"):  # a tensor descriptor
        yield from _extents(argument.base)


def _watch_launches() -> None:
    plain = Executor._init_args_hst

    def start(self: Any, args: Any, kwargs: Any) -> Any:
        host_args, host_kwargs = plain(self, args, kwargs)
        _Launch.start(self.fn.__name__, [*host_args, *host_kwargs.values(), _Launch.reached])
        return host_args, host_kwargs

    Executor._init_args_hst = start


def _itemsize(pointers: Any) -> int:
    return int(interpreter._get_np_dtype(pointers.get_element_ty()).itemsize)


def _watch_loads() -> None:
    plain = Builder.create_masked_load

    def load(self: Any, pointers: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        cells = _Launch.check(pointers, mask, _itemsize(pointers), "load", self.grid_idx)
        other = _Launch.others(cells, self.grid_idx) if _Launch.programs else None
        if other:
            raise MemoryFaultError(
                f"{_Launch.name}: program {self.grid_idx} loads a cell that program {other} stored"
            )
        return plain(self, pointers, mask, *rest, **kwargs)

    Builder.create_masked_load = load


def _watch_stores() -> None:
    plain = Builder.create_masked_store

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        cells = _Launch.check(pointers, mask, _itemsize(pointers), "store", self.grid_idx)
        if len(np.unique(cells)) != len(cells):
            raise MemoryFaultError(
                f"{_Launch.name}: two lanes of one store of program {self.grid_idx} "
                "hit the same address"
            )
        other = _Launch.others(cells, self.grid_idx)
        if other:
            raise MemoryFaultError(
                f"{_Launch.name}: programs {other} and {self.grid_idx} store to the same cell"
            )
        _Launch.writer[cells] = _Launch.number(self.grid_idx)
        return plain(self, pointers, value, mask, *rest, **kwargs)

    Builder.create_masked_store = store


def _watch_atomics() -> None:
    plain_rmw, plain_cas = Builder.create_atomic_rmw, Builder.create_atomic_cas
    everywhere = interpreter.TensorHandle(np.ones(1, dtype=bool), tl.int1)

    def rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _Launch.check(pointers, mask, value.data.dtype.itemsize, "atomic", self.grid_idx)
        return plain_rmw(self, op, pointers, value, mask, *rest)

    def cas(self: Any, pointers: Any, expected: Any, value: Any, *rest: Any) -> Any:
        itemsize = value.data.dtype.itemsize
        _Launch.check(pointers, everywhere, itemsize, "atomic_cas", self.grid_idx)
        return plain_cas(self, pointers, expected, value, *rest)

    Builder.create_atomic_rmw, Builder.create_atomic_cas = rmw, cas
