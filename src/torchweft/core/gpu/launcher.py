"""Launch Triton kernels with little work on the host: all arguments but the operands are fixed.

Triton's own launcher binds, inspects and hashes every argument at every call.  A `Kernel` does so
once for each combination of aligned tensors, and caches the machine code; a `Launcher` is a kernel
with a fixed grid and fixed tables.
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

from torchweft.core import private, private_compilers
from torchweft.core.backend import interpreted
from torchweft.core.explain import Launch, record, recording
from torchweft.core.gpu.ahead import noting
from torchweft.core.gpu.binaries import kinds
from torchweft.core.gpu.driver import Run, begin, begin_apart, machine_code, on_disk
from torchweft.core.gpu.workers import Workers

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
    "has_tf32",
    "launch_all",
    "processors",
]


CONTRACTED = {"enable_fp_fusion": True}
"""a·b + c is one fused multiply-add, which Triton 3.10 uses only with this option."""


class Tile(NamedTuple):
    """Block sizes of a kernel in the order of its last parameters, and how it is compiled.

    `registers` limits the registers of a thread (NVIDIA): fewer let more programs run at a time.
    """

    blocks: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Compile options for Triton."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


class Kernel:
    """`kernel[(programs,)](*tensors, *free, *fixed, *constants, *tile.blocks)`.

    Code depends on the device, on dtypes and on which tensors are None: a cache of kernels has one
    for each of these.

    Args:
        kernel: a jitted function whose parameters have this order.
        fixed: arguments of every launch: tables, counts and strides; None for an absent one.
        constants: the leading constexprs.
        tile: the trailing constexprs, warps and stages.
    """

    __slots__ = (
        "_arguments",
        "_dtypes",
        "_kernel",
        "_options",
        "_ready",
        "_shown",
        "aligned",
        "fixed",
    )

    def __init__(
        self,
        kernel: Any,
        fixed: tuple[Tensor | int | None, ...],
        constants: tuple[Any, ...],
        tile: Tile,
    ) -> None:
        self._kernel = kernel
        self._arguments = (*fixed, *constants, *tile.blocks)
        self.fixed = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in self._arguments)
        self._options = tile.options | CONTRACTED
        self.aligned: Run | None = None
        self._ready: dict[tuple[int, ...], Run] = {}
        self._dtypes: tuple[torch.dtype | None, ...] | None = None  # in the interpreter
        values = [v if isinstance(v, str | None) else int(v) for v in (*constants, *tile.blocks)]
        names = kernel.arg_names[len(kernel.arg_names) - len(values) :]
        self._shown: dict[str, Any] = dict(zip(names, values, strict=True)) | tile.options

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        free: tuple[float, ...] = (),
        workspace_bytes: int = 0,
    ) -> None:
        """Launch on the current stream of the current device, which must be the tensors' device.

        Args:
            programs: number of programs, all along grid axis 0.
            tensors: the same ones are None in every call.
            free: numbers on which no code depends, such as counts of rows; floats have 32 bits.
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
                self._check_dtypes(tensors)
                self._kernel[(programs,)](*tensors, *free, *self._arguments)
                return
            if (workers := noting()) is not None:
                self.begin_apart(workers, tensors, free)
                return
            run = self._compile(tensors, pointers, free)
        run(programs, _current_stream(), (*pointers, *free, *self.fixed))

    def _check_dtypes(self, tensors: Sequence[Tensor | None]) -> None:
        """What a GPU cannot check: it runs the code of the first call's dtypes."""
        dtypes = tuple(None if t is None else t.dtype for t in tensors)
        if dtypes != (self._dtypes or dtypes):
            raise TypeError(
                f"{self._kernel.__name__} was compiled for {self._dtypes} and is called with "
                f"{dtypes}: its key in the cache of kernels must tell these apart."
            )
        self._dtypes = dtypes

    @property
    def compiled(self) -> bool:
        """Whether code for some tensors is loaded."""
        return bool(self._ready)

    @property
    def source(self) -> tuple[Any, ...]:
        """What code depends on, except the fixed arguments."""
        # the function's identity: Triton computes its hash from its syntax tree
        return (id(self._kernel), *self._shown.items())

    def stored(self, tensors: Sequence[Tensor | None], free: tuple[float, ...] = ()) -> bool:
        """Whether the code for tensors like these is on disk."""
        return on_disk(self._kernel, (*tensors, *free, *self._arguments), self._options)

    def begin(
        self, pool: Executor, tensors: Sequence[Tensor | None], free: tuple[float, ...] = ()
    ) -> bool:
        """Begin to compile the code for tensors like these; False if only Triton can."""
        return begin(self._kernel, (*tensors, *free, *self._arguments), self._options, pool)

    def begin_apart(
        self, workers: Workers, tensors: Sequence[Tensor | None], free: tuple[float, ...] = ()
    ) -> bool:
        """The same in another process; False if it cannot go there."""
        return begin_apart(
            self._kernel, (*tensors, *free, *self._arguments), self._options, workers
        )

    def compile(self, tensors: Sequence[Tensor | None], free: tuple[float, ...] = ()) -> None:
        """Let Triton compile the code for tensors like these into its own cache."""
        arguments = (*tensors, *free, *self._arguments)
        self._kernel.run(*arguments, grid=(1,), warmup=True, **self._options)

    def _compile(
        self,
        tensors: Sequence[Tensor | None],
        pointers: Sequence[int | None],
        free: tuple[float, ...],
    ) -> Run:
        run = _loaded(self._kernel, (*tensors, *free, *self._arguments), self._options)
        # machine code depends on which tensors are aligned to 16 bytes
        key = _alignment(pointers)
        self._ready[key] = run
        if not any(key):
            self.aligned = run
        return run


_runs: dict[tuple[Any, ...], tuple[Any, Run]] = {}
"""Loaded code by the function's id, specialization, options and device; with the function."""


def _loaded(kernel: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Run:
    """Machine code for arguments like these, loaded once for all sizes that share it."""
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
        programs: number of programs, all along grid axis 0.
        tables: tensors that every launch reads; None for an absent one.
        numbers: counts and strides; None for an absent one.
        constants: the leading constexprs.
        tile: the trailing constexprs, warps and stages.
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
        """Launch on the current stream of the current device, which must be the operands' device.

        The same operands are None in every call of one launcher.
        """
        self.kernel(self.programs, operands, (), workspace_bytes)


class Queued(NamedTuple):
    """A launch in a queue."""

    launcher: Launcher
    operands: Sequence[Tensor | None]
    workspace_bytes: int = 0


class Step(NamedTuple):
    """A kernel, and the positions of its tensors among all tensors of a call."""

    kernel: Kernel
    programs: int
    taken: Sequence[int]
    free: tuple[float, ...] = ()
    workspace_bytes: int = 0  # for `explain`


class Launches:
    """Consecutive kernels on some of a call's tensors each: `launches(tensors)`.

    The address of each tensor is read once.

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
        """Launch on the current stream of the current device, which must be the tensors' device."""
        used = self._used(tensors)
        pointers = [0 if t is None else t.data_ptr() for t in used]  # code takes no None
        plain = not (functools.reduce(operator.or_, pointers, 0) & 15 or recording())
        for takes, (kernel, programs, _, free, workspace_bytes) in self._runs:
            run = kernel.aligned
            if run is None or not plain:
                kernel(programs, takes(used), free, workspace_bytes)
            elif programs:
                run(programs, _current_stream(), (*takes(pointers), *free, *kernel.fixed))


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """itemgetter that always returns a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda given: tuple(given[n] for n in places)


_made: set[tuple[Any, ...]] = set()
"""Sources whose code was compiled or found on disk, for any fixed arguments."""


def launch_all(queue: Sequence[Queued]) -> None:
    """Launch in order; new kernels are compiled together, in threads.

    Triton's compiler releases Python's lock, so several kernels take little longer than one.
    """
    if not all(q.launcher.kernel.compiled for q in queue):
        compile_together([Call(q.launcher.kernel, q.operands) for q in queue])
    for launcher, operands, workspace_bytes in queue:
        launcher(operands, workspace_bytes)


class Call(NamedTuple):
    """A future call of a kernel: tensors of these dtypes, and any numbers."""

    kernel: Kernel
    tensors: Sequence[Tensor | None]
    free: tuple[float, ...] = ()


def compile_together(calls: Sequence[Call]) -> None:
    """Begin to compile the kernels that are new and not on disk; their launches wait for the code.

    The kernel that takes longest comes first.
    """
    if noting() is not None:  # launches begin what they need, and that alone
        return
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
    """Walk one syntax tree after the other; the other stages run in threads, past the return."""
    pool = ThreadPoolExecutor(len(calls))
    try:
        rest = [call for call in calls if not call.kernel.begin(pool, *call[1:])]
        if rest:
            _have_triton_compile(rest, pool)
    finally:
        pool.shutdown(wait=False)


def _have_triton_compile(calls: Sequence[Call], pool: Executor) -> None:
    private_compilers.driver.active.get_current_target()  # initialized here, not by each thread
    device = private.get_device()

    def compile_(call: Call) -> None:
        with torch.cuda.device(device):
            call.kernel.compile(*call[1:])

    list(pool.map(compile_, calls))


def current_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's device current, as launches require."""
    if not tensor.is_cuda or tensor.get_device() == private.get_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter, where programs run one by one."""
    if interpreted():
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def has_tf32(device: torch.device) -> bool:
    """Whether tensor cores multiply TF32; the interpreter takes such products for exact."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _alignment(pointers: Sequence[int | None]) -> tuple[int, ...]:
    """Which addresses are not aligned to 16 bytes."""
    return tuple((p or 0) & 15 and 1 for p in pointers)


def _current_stream() -> int:
    """The handle of the current stream of the current device."""
    stream: int = private.raw_stream(private.get_device())
    return stream
