"""Compile Triton kernels, and launch their machine code with CUDA's driver.

    syntax → Triton's dialect → the GPU's → LLVM's → PTX → machine code

The key of Triton's cache reads an installation of 400 MB, and its driver is compiled by gcc: half a
second before the first kernel.  Triton also builds a C extension for every signature of a kernel,
a fifth of a second each.  Here Triton's stages are called without its cache and driver: only the
first one, `walk`, holds Python's lock; the others, `lower`, may run in any thread.  The driver
needs only the addresses of the arguments, which `struct` writes in less time than an extension
takes to read them.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchweft.core import private
from torchweft.core.gpu import binaries
from torchweft.core.gpu.binaries import Code
from torchweft.core.printing.modules import Jitted
from torchweft.errors import BackendError

__all__ = ["Run", "Walked", "begin", "layout", "lower", "machine_code", "on_disk", "serves", "walk"]


Run = Callable[[int, int, Sequence[Any]], None]
"""(programs, stream, values): launch with all arguments in their order, tensors as addresses."""

SLOT = 8
"""Bytes between arguments: of the largest."""

SCRATCH = 2
"""Pointers behind the arguments of machine code, of the Triton that is known: see `layout`."""

CONFIG = "<7I4xQQI4x"
"""The driver's CUlaunchConfig: grid, block, shared memory, stream, attributes and how many."""

NONE = 0
"""Attributes of ours."""

NO_CONTEXT = 201
"""What the driver says to a thread that has called nothing of CUDA, as autograd's may: torch hands
it memory that it kept, without a call."""

FORMATS = {
    "i1": "b7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q",
    "u1": "B7x", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q",
    "fp32": "f4x", "fp64": "d", "*": "Q",
}  # fmt: skip
"""A slot of each type, as `struct` writes it."""


class Walked(NamedTuple):
    """A kernel in Triton's dialect, and what is left to do.

    Args:
        source: as Triton describes it.
        module: the kernel.
        stages: what follows, by the endings of their results.
        metadata: options; the stages add what a launch needs.
    """

    source: Any
    module: Any
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]]
    metadata: dict[str, Any]


def serves() -> bool:
    """Whether this is a Triton whose stages and machine code are those described here."""
    import triton

    return private.launches_fast(triton.__version__)


def walk(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Walked:
    """A jitted function for arguments like these on the current device, one of NVIDIA's."""
    from torchweft.core.private import (
        ASTSource,
        GluonASTSource,
        GPUTarget,
        create_function_from_signature,
        ir,
        make_backend,
        pack_args,
    )

    target = GPUTarget("cuda", int(str(binaries.device()).removeprefix("sm_")), 32)
    backend = make_backend(target)
    given = {"debug": False, "instrumentation_mode": "", **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, _ = bind(*arguments, **given)
    settled, *described = pack_args(kernel, backend, given, bound, kinds)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *described)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parts = backend.get_codegen_implementation(settled), backend.get_module_map()
    module = source.make_ir(target, settled, *parts, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, settled, source.language)
    first = list(stages).index(source.ext)
    metadata = {"target": target, **vars(settled)}
    return Walked(source, module, dict(list(stages.items())[first:]), metadata)


def lower(walked: Walked) -> Any:
    """The compiled kernel, as Triton describes it."""
    source, module, stages, metadata = walked
    for stage in stages.values():
        module = stage(module, metadata)
    code = {list(stages)[-1]: module}
    meta = SimpleNamespace(**metadata)
    return SimpleNamespace(name=meta.name, src=source, asm=code, metadata=meta)


def machine_code(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Run:
    """Code of a kernel for arguments like these, on the current device: from disk, or compiled.

    Later values must be None, aligned to 16 bytes or equal to 1 where these are, as the kernel's
    own specialisation says; constants are handed over and passed by.
    """
    name = binaries.key(kernel, arguments, options)
    code = None if name is None else _found(name)
    if code is None and name is not None and serves():
        code = _finish(*_walked(name, kernel, arguments, options))
    if code is None:
        return _asked_of_triton(kernel, arguments, options)
    return _by_driver(code)


def begin(
    kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], pool: Executor
) -> bool:
    """Have code compiled that `machine_code` will be asked for; False: Triton must be.

    Its syntax is walked now, all else is left to the pool.
    """
    name = binaries.key(kernel, arguments, options)
    if name is None or not serves():
        return False
    if name not in _begun:
        _begun[name] = pool.submit(_finish, *_walked(name, kernel, arguments, options))
    return True


_begun: dict[str, Future[Code | None]] = {}
"""Code that is being compiled, or waits for its first launch."""


def _found(name: str) -> Code | None:
    begun = _begun.get(name)
    if begun is None:
        return binaries.read(name)
    try:
        return begun.result()
    finally:
        _begun.pop(name, None)


def _walked(
    name: str, kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[str | None, Walked]:
    function = kernel.function() if isinstance(kernel, Jitted) else kernel
    walked = walk(function, arguments, options)
    # who edits meanwhile gets code that is not kept
    return name if name == binaries.key(kernel, arguments, options) else None, walked


def _finish(name: str | None, walked: Walked) -> Code | None:
    code = _code(lower(walked))
    if name is not None and code is not None:
        binaries.store(name, code)
    return code


def _asked_of_triton(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Run:
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    code = _code(compiled)
    return _by_triton(compiled) if code is None else _by_driver(code)


def on_disk(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether `machine_code` will find it there."""
    name = binaries.key(kernel, arguments, options)
    return name is not None and binaries.exists(name)


def _code(compiled: Any) -> Code | None:
    found, meta = layout(compiled), compiled.metadata
    if found is None:
        return None
    taken, slots = found
    binary = compiled.asm["cubin"]
    return Code(compiled.name, binary, meta.num_warps, meta.shared, tuple(taken), slots)


def layout(code: Any) -> tuple[list[int], str] | None:
    """(the arguments that compiled code takes, their slots); None: only Triton knows how."""
    meta = code.metadata
    plain = (
        serves()
        and meta.target.backend == "cuda"
        and meta.num_ctas == 1
        and not (meta.launch_cooperative_grid or meta.launch_pdl)
        and not (meta.global_scratch_size or meta.profile_scratch_size)
    )
    kinds = [(i, kind) for i, kind in enumerate(code.src.signature.values()) if kind != "constexpr"]
    slots = [FORMATS.get("*" if str(kind)[0] == "*" else kind) for _, kind in kinds]
    if not plain or len(slots) < 2 or None in slots:
        return None
    return [i for i, _ in kinds], "<" + "".join(map(str, slots))


class _Frame:
    """Memory for the grid and the arguments of one call, until the driver has read them."""

    __slots__ = ("addresses", "buffer", "config")

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(struct.calcsize(CONFIG) + SLOT * size)
        self.config = ctypes.byref(self.buffer)
        begin = ctypes.addressof(self.buffer) + struct.calcsize(CONFIG)
        self.addresses = (ctypes.c_void_p * size)(*(begin + SLOT * i for i in range(size)))


def _by_driver(code: Code) -> Run:
    function, launch = _loaded(code), _driver().cuLaunchKernelEx
    shared, threads = code.shared, 32 * code.num_warps
    # few arguments of few kinds: ctypes looks at each
    pack = struct.Struct(CONFIG + code.slots.lstrip("<")).pack_into
    take = operator.itemgetter(*code.taken)
    size = len(code.taken) + SCRATCH  # no kernel of this kind has scratch: null pointers
    handle, idle = ctypes.c_void_p(function), [_Frame(size)]

    def run(programs: int, stream: int, values: Sequence[Any]) -> None:
        # threads that launch at once take frames of their own
        try:
            frame = idle.pop()
        except IndexError:
            frame = _Frame(size)
        grid = programs, 1, 1, threads, 1, 1, shared, stream
        pack(frame.buffer, 0, *grid, NONE, NONE, *take(values))
        failed = launch(frame.config, handle, frame.addresses, None)
        if failed == NO_CONTEXT:
            _enter_context()
            failed = launch(frame.config, handle, frame.addresses, None)
        idle.append(frame)
        if failed:
            raise _refused("launch", code.name, failed)

    return run


def _by_triton(code: Any) -> Run:
    """Through Triton's own launcher, without its hooks for profilers."""
    run = code.run  # loads the code
    settled = (code.function, code.packed_metadata, None, None, None)

    def launch(programs: int, stream: int, values: Sequence[Any]) -> None:
        run(programs, 1, 1, stream, *settled, *values)

    return launch


def _loaded(code: Code) -> int:
    """The function's handle on the current device.

    Raises:
        OutOfResources: of Triton, where a program needs more than the device has.
    """
    driver, device = _driver(), ctypes.c_int(private.get_device())
    context, module, function = (ctypes.c_void_p() for _ in range(3))
    _must(driver.cuCtxGetCurrent(ctypes.byref(context)), "enter", "a context")
    if not context.value:
        _enter_context()
    most = _asked(driver.cuDeviceGetAttribute, MOST_SHARED, device)
    _check_fits(code.shared, most, "shared memory")
    _must(driver.cuModuleLoadData(ctypes.byref(module), code.binary), "load", code.name)
    name = code.name.encode()
    _must(driver.cuModuleGetFunction(ctypes.byref(function), module, name), "find", code.name)
    most_threads = _asked(driver.cuFuncGetAttribute, MOST_THREADS, function)
    _check_fits(32 * code.num_warps, most_threads, "threads")
    if code.shared > PLAIN_SHARED:
        own = _asked(driver.cuFuncGetAttribute, STATIC_SHARED, function)
        _must(driver.cuFuncSetCacheConfig(function, PREFER_SHARED), "load", code.name)
        status = driver.cuFuncSetAttribute(function, DYNAMIC_SHARED, most - own)
        _must(status, "load", code.name)
    return int(function.value or 0)


MOST_SHARED, MOST_THREADS, STATIC_SHARED, DYNAMIC_SHARED, PREFER_SHARED = 97, 0, 1, 8, 1
"""The driver's numbers: of a device's and of a function's attributes, and of a cache's."""

PLAIN_SHARED = 48 * 1024
"""Bytes that a function has without asking."""


def _enter_context() -> None:
    """Make the current device's context, torch's, that of this thread."""
    driver, context = _driver(), ctypes.c_void_p()
    device = ctypes.c_int(private.get_device())
    _must(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "enter", "a context")
    _must(driver.cuCtxSetCurrent(context), "enter", "a context")


def _asked(question: Callable[..., int], attribute: int, of: Any) -> int:
    found = ctypes.c_int()
    _must(question(ctypes.byref(found), attribute, of), "describe", "a device or a function")
    return found.value


def _check_fits(needed: int, most: int, what: str) -> None:
    if needed > most:
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(needed, most, what)


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _must(status: int, verb: str, what: str) -> None:
    if status:
        raise _refused(verb, what, status)


def _refused(verb: str, what: str, status: int) -> BackendError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    said = (text.value or b"unknown error").decode()
    return BackendError(
        f"the driver refused to {verb} {what} (error {status}: {said}): kernels need a device "
        "without an earlier error. Run with CUDA_LAUNCH_BLOCKING=1 to find the first one."
    )
