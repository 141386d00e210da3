"""Launch Triton kernels with little work on the host: everything but the operands is settled once.

Triton's own launcher binds, inspects and hashes every argument at every call.  A `Kernel` does so
once for each combination of aligned tensors, and keeps the machine code; a `Launcher` is one whose
grid and tables are settled too.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.backend import interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.gpu.binaries import kinds
from torchweft.core.gpu.driver import Run, begin, machine_code, on_disk

__all__ = [
    "CONTRACTED",
    "Call",
    "Kernel",
    "Launcher",
    "Launches",
    "Queued",
    "Step",
    "Tile",
    "compile_together",
    "current_device",
    "launch_all",
    "processors",
]


CONTRACTED = {"enable_fp_fusion": True}
"""a·b + c is one fused multiply-add.  Triton 3.10 does so only where it is asked to."""


class Tile(NamedTuple):
    """Block sizes of a kernel in the order of its last parameters, and how it is compiled.

    `registers` is the most that a thread may have (NVIDIA): fewer let more programs run at a time.
    """

    blocks: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Those of Triton."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


class Kernel:
    """`kernel[(programs,)](*tensors, *free, *settled, *constants, *tile.blocks)`.

    Code depends on the device, on dtypes and on which tensors are None: who keeps a kernel has one
    for each.

    Args:
        kernel: a jitted function whose parameters have this order.
        settled: what every launch reads: tables, counts and strides; None is one not there.
        constants: the leading constexprs.
        tile: the trailing ones, warps and stages.
    """

    __slots__ = ("_arguments", "_kernel", "_options", "_ready", "_shown", "aligned", "settled")

    def __init__(
        self,
        kernel: Any,
        settled: tuple[Tensor | int | None, ...],
        constants: tuple[Any, ...],
        tile: Tile,
    ) -> None:
        self._kernel = kernel
        self._arguments = (*settled, *constants, *tile.blocks)
        self.settled = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in self._arguments)
        self._options = tile.options | CONTRACTED
        self.aligned: Run | None = None
        self._ready: dict[tuple[int, ...], Run] = {}
        values = [v if isinstance(v, str | None) else int(v) for v in (*constants, *tile.blocks)]
        names = kernel.arg_names[len(kernel.arg_names) - len(values) :]
        self._shown: dict[str, Any] = dict(zip(names, values, strict=True)) | tile.options

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        free: tuple[int, ...] = (),
        workspace_bytes: int = 0,
    ) -> None:
        """Launch on the current stream of the device that is current: the tensors' own.

        Args:
            programs: how many, all along grid axis 0.
            tensors: the same are None in every call.
            free: numbers that no code depends on, such as counts of rows.
            workspace_bytes: for `explain`.
        """
        if programs == 0:
            return
        if recording():
            name = self._kernel.__name__
            record(Launch("triton", name, self._shown, programs, workspace_bytes))
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        run = self.aligned
        for pointer in pointers:
            if pointer is not None and pointer & 15:
                run = self._ready.get(_alignment(pointers))
                break
        if run is None:
            if interpreted():
                self._kernel[(programs,)](*tensors, *free, *self._arguments)
                return
            run = self._compile(tensors, pointers, free)
        run(programs, _current_stream(), (*pointers, *free, *self.settled))

    @property
    def compiled(self) -> bool:
        """Whether there is code for some tensors."""
        return bool(self._ready)

    @property
    def source(self) -> tuple[Any, ...]:
        """What code is made of, but for the settled arguments."""
        # a function by its identity: for its hash Triton walks through its syntax
        return (id(self._kernel), *self._shown.items())

    def stored(self, tensors: Sequence[Tensor | None], free: tuple[int, ...] = ()) -> bool:
        """Whether the code for such tensors is on disk."""
        return on_disk(self._kernel, (*tensors, *free, *self._arguments), self._options)

    def begin(
        self, pool: Executor, tensors: Sequence[Tensor | None], free: tuple[int, ...] = ()
    ) -> bool:
        """Have the code for such tensors compiled; False: only Triton can, see `compile`."""
        return begin(self._kernel, (*tensors, *free, *self._arguments), self._options, pool)

    def compile(self, tensors: Sequence[Tensor | None], free: tuple[int, ...] = ()) -> None:
        """Have Triton make the code for such tensors, and keep it."""
        arguments = (*tensors, *free, *self._arguments)
        self._kernel.run(*arguments, grid=(1,), warmup=True, **self._options)

    def _compile(
        self,
        tensors: Sequence[Tensor | None],
        pointers: Sequence[int | None],
        free: tuple[int, ...],
    ) -> Run:
        run = _loaded(self._kernel, (*tensors, *free, *self._arguments), self._options)
        # machine code depends on which tensors are aligned to 16 bytes
        key = _alignment(pointers)
        self._ready[key] = run
        if not any(key):
            self.aligned = run
        return run


_runs: dict[tuple[Any, ...], tuple[Any, Run]] = {}
"""Code of this process by function, kinds of arguments, options and device; with the function."""


def _loaded(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Run:
    """Machine code for such arguments, loaded once: other sizes are seldom other code."""
    found = kinds(kernel, arguments)
    if found is None:
        return machine_code(kernel, arguments, options)
    key = (id(kernel), found, *options.items(), private.get_device())
    if key not in _runs:
        _runs[key] = kernel, machine_code(kernel, arguments, options)
    return _runs[key][1]


class Launcher:
    """`kernel[(programs,)](*operands, *tables, *numbers, *constants, *tile.blocks)`.

    Args:
        kernel: a jitted function whose parameters have this order.
        programs: how many, all along grid axis 0.
        tables: tensors that every launch reads; None is one that is not there.
        numbers: counts and strides; None is one that the kernel does without.
        constants: the leading constexprs.
        tile: the trailing ones, warps and stages.
    """

    __slots__ = ("kernel", "programs")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        tables: tuple[Tensor | None, ...],
        numbers: tuple[int | None, ...],
        constants: tuple[Any, ...],
        tile: Tile,
    ) -> None:
        self.kernel = Kernel(kernel, (*tables, *numbers), constants, tile)
        self.programs = programs

    def __call__(self, operands: Sequence[Tensor | None], workspace_bytes: int = 0) -> None:
        """Launch on the current stream of the device that is current: the operands' own.

        The same operands are None in every call of one launcher.
        """
        self.kernel(self.programs, operands, (), workspace_bytes)


class Queued(NamedTuple):
    """A launch that waits for others."""

    launcher: Launcher
    operands: Sequence[Tensor | None]
    workspace_bytes: int = 0


class Step(NamedTuple):
    """A kernel, and which tensors it takes, of all that a call has side by side."""

    kernel: Kernel
    programs: int
    taken: Sequence[int]
    free: tuple[int, ...] = ()
    workspace_bytes: int = 0  # for `explain`


class Launches:
    """Kernels on some of a call's tensors each, one after the other: `launches(tensors)`.

    The address of a tensor is asked for once.

    Args:
        steps: the kernels.
    """

    __slots__ = ("_runs", "_used", "steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        used = sorted({n for step in steps for n in step.taken})
        self._used = _taking(used)
        places = {n: i for i, n in enumerate(used)}
        self._runs = [(_taking([places[n] for n in step.taken]), step) for step in steps]

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream of the device that is current: the tensors' own."""
        used = self._used(tensors)
        pointers = [0 if t is None else t.data_ptr() for t in used]  # code takes no None
        plain = not (functools.reduce(operator.or_, pointers, 0) & 15 or recording())
        for takes, (kernel, programs, _, free, workspace_bytes) in self._runs:
            run = kernel.aligned
            if run is None or not plain:
                kernel(programs, takes(used), free, workspace_bytes)
            elif programs:
                run(programs, _current_stream(), (*takes(pointers), *free, *kernel.settled))


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Those at some places, as a tuple however few."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda given: tuple(given[n] for n in places)


_made: set[tuple[Any, ...]] = set()
"""The sources that were compiled or found on disk, for any settled arguments."""


def launch_all(queue: Sequence[Queued]) -> None:
    """Launch one after the other; what is new is compiled at once, in threads.

    Triton's compiler works without Python's lock, so several kernels take little longer than one.
    """
    if not all(q.launcher.kernel.compiled for q in queue):
        compile_together([Call(q.launcher.kernel, q.operands) for q in queue])
    for launcher, operands, workspace_bytes in queue:
        launcher(operands, workspace_bytes)


class Call(NamedTuple):
    """What a kernel will be called with: tensors of these dtypes, and any numbers."""

    kernel: Kernel
    tensors: Sequence[Tensor | None]
    free: tuple[int, ...] = ()


def compile_together(calls: Sequence[Call]) -> None:
    """Begin to compile the kernels that are new and not on disk; their launches wait for it.

    What takes longest stands first.
    """
    new = {}
    for call in calls:
        kernel = call.kernel
        code = (*kernel.source, *(t is None for t in call.tensors))
        if not kernel.compiled and code not in _made:
            new[code] = call
    if new and not interpreted():
        missing = [call for call in new.values() if not call.kernel.stored(*call[1:])]
        if missing:
            _compile_in_threads(missing)
    _made.update(new)


def _compile_in_threads(calls: Sequence[Call]) -> None:
    """Python walks one syntax after the other; what follows goes on while others launch."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        rest = [call for call in calls if not call.kernel.begin(pool, *call[1:])]
        if rest:
            _have_triton_compile(rest, pool)
    finally:
        pool.shutdown(wait=False)


def _have_triton_compile(calls: Sequence[Call], pool: Executor) -> None:
    private.driver.active.get_current_target()  # made once, not by each thread
    device = private.get_device()

    def compile_(call: Call) -> None:
        with torch.cuda.device(device):
            call.kernel.compile(*call[1:])

    list(pool.map(compile_, calls))


def current_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as launches need it."""
    if not tensor.is_cuda or tensor.get_device() == private.get_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter one, for its speed."""
    if interpreted():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _alignment(pointers: Sequence[int | None]) -> tuple[int, ...]:
    """Which addresses are not aligned to 16 bytes."""
    return tuple((p or 0) & 15 and 1 for p in pointers)


def _current_stream() -> int:
    """The handle of the current stream of the current device."""
    stream: int = private.raw_stream(private.get_device())
    return stream
