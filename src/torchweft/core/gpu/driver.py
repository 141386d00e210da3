"""Find or compile machine code of Triton kernels, and launch it with CUDA's driver.

Triton builds a C extension for every signature of a kernel, a fifth of a second each, and its
driver is compiled by gcc.  Here the driver is called directly: it needs only the addresses of the
arguments, which `struct` writes in less time than an extension takes to read them.

Code that will be needed is compiled beside other work: in threads of this process by `begin`, in
other processes by `begin_apart`.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from torch import Tensor

from torchweft.core import private
from torchweft.core.files import has_code
from torchweft.core.gpu import binaries
from torchweft.core.gpu.compiler import Code, Pointer, Walked, code_of, lower, serves, walk
from torchweft.core.gpu.workers import Job, Workers
from torchweft.core.printing.modules import Jitted
from torchweft.errors import BackendError

__all__ = ["Run", "begin", "begin_apart", "machine_code", "on_disk"]


Run = Callable[[int, int, Sequence[Any]], None]
"""(programs, stream, values): launch with all arguments in order, tensors as addresses."""

SLOT_BYTES = 8
"""Bytes from one argument to the next, enough for the largest type."""

SCRATCH = 2
"""Scratch pointers after the arguments of machine code, for the supported Triton: see `layout`."""

LAUNCH_CONFIG = "<7I4xQQI4x"
"""CUlaunchConfig: grid, block, shared memory, stream, attributes and their number."""

NO_CONTEXT = 201
"""The driver's error in a thread that has not called CUDA yet, as one of autograd's: memory that
torch had cached is passed to it without a call."""


def machine_code(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Run:
    """A kernel's code for arguments like these on the current device: from disk, or compiled.

    Later values must be None, aligned to 16 bytes or equal to 1 where these are, as the kernel's
    specialization requires; constants are passed too, and ignored.
    """
    name = binaries.key(kernel, arguments, options)
    code = None if name is None else _found(name)
    if code is None and name is not None and serves():
        code = _finish(*_walked(name, kernel, arguments, options))
    if code is None:
        compiled = kernel.run(*arguments, grid=(1,), warmup=True, **options)
        code = code_of(compiled)
        if code is None:
            return _by_triton(compiled)
    return _by_driver(code)


def begin(
    kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], pool: Executor
) -> bool:
    """Begin to compile code that `machine_code` will return; False if only Triton can.

    The syntax tree is walked now, the other stages run in the pool.
    """
    name = binaries.key(kernel, arguments, options)
    if name is None or not serves():
        return False
    if name not in _begun:
        _begun[name] = pool.submit(_finish, *_walked(name, kernel, arguments, options))
    return True


def begin_apart(
    kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], workers: Workers
) -> bool:
    """Begin to compile code that `machine_code` will return, in another process.

    False if it cannot go there; code that is on disk or was begun needs no work.
    """
    name = binaries.key(kernel, arguments, options)
    if name is None or not serves() or not isinstance(kernel, Jitted) or kernel.origin is None:
        return False
    if name not in _begun and not has_code(name):
        alike = tuple(_pointer(a) if isinstance(a, Tensor) else a for a in arguments)
        job = Job(kernel.origin, alike, dict(options), str(binaries.device()))
        _begun[name] = future = workers.submit(job, _work(kernel.src))
        future.add_done_callback(functools.partial(_store, name, kernel, alike, options))
    return True


def _work(text: str) -> float:
    """How long a kernel takes to compile, roughly: products of matrices become long code."""
    return len(text) * (10 if "dot(" in text or "add_product(" in text else 1)


def _pointer(tensor: Tensor) -> Pointer:
    return Pointer(str(tensor.dtype), tensor.data_ptr() % 16)


def _store(
    name: str,
    kernel: Any,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    made: Future[Code | None],
) -> None:
    """Keep code on disk, unless a text was edited since its key was made."""
    code = made.result()
    if code is not None and name == binaries.key(kernel, arguments, options):
        binaries.store(name, code)


_begun: dict[str, Future[Code | None]] = {}
"""Code that is being compiled, or was not launched yet."""


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
    walked = walk(function, arguments, options, str(binaries.device()))
    # code of a text that was edited meanwhile is not stored
    return name if name == binaries.key(kernel, arguments, options) else None, walked


def _finish(name: str | None, walked: Walked) -> Code | None:
    code = code_of(lower(walked))
    if name is not None and code is not None:
        binaries.store(name, code)
    return code


def on_disk(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether `machine_code` will find the code on disk."""
    name = binaries.key(kernel, arguments, options)
    return name is not None and has_code(name)


class _Frame:
    """Memory for the grid and the arguments of one launch, until the driver has read them."""

    __slots__ = ("addresses", "buffer", "config")

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(
            struct.calcsize(LAUNCH_CONFIG) + SLOT_BYTES * size
        )
        self.config = ctypes.byref(self.buffer)
        begin = ctypes.addressof(self.buffer) + struct.calcsize(LAUNCH_CONFIG)
        self.addresses = (ctypes.c_void_p * size)(*(begin + SLOT_BYTES * i for i in range(size)))


def _by_driver(code: Code) -> Run:
    function, launch = _loaded(code), _driver().cuLaunchKernelEx
    shared, threads = code.shared, 32 * code.num_warps
    # one `pack_into` for all arguments: ctypes inspects every argument it is given
    pack = struct.Struct(LAUNCH_CONFIG + code.slots.lstrip("<")).pack_into
    take = operator.itemgetter(*code.taken)
    size = len(code.taken) + SCRATCH  # `layout` admits no kernel with scratch: null pointers
    handle, idle = ctypes.c_void_p(function), [_Frame(size)]

    def run(programs: int, stream: int, values: Sequence[Any]) -> None:
        # concurrent launches use different frames
        try:
            frame = idle.pop()
        except IndexError:
            frame = _Frame(size)
        grid = programs, 1, 1, threads, 1, 1, shared, stream
        pack(frame.buffer, 0, *grid, 0, 0, *take(values))  # no launch attributes
        failed = launch(frame.config, handle, frame.addresses, None)
        if failed == NO_CONTEXT:
            _enter_context()
            failed = launch(frame.config, handle, frame.addresses, None)
        idle.append(frame)
        if failed:
            raise _refused("launch", code.name, failed)

    return run


def _by_triton(code: Any) -> Run:
    """Launches by Triton's own launcher, without its hooks for profilers."""
    run = code.run  # loads the code
    fixed = (code.function, code.packed_metadata, None, None, None)

    def launch(programs: int, stream: int, values: Sequence[Any]) -> None:
        run(programs, 1, 1, stream, *fixed, *values)

    return launch


def _loaded(code: Code) -> int:
    """The function's handle on the current device.

    Raises:
        OutOfResources: Triton's error; a program needs more than the device has.
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
    if code.shared > DEFAULT_SHARED:
        own = _asked(driver.cuFuncGetAttribute, STATIC_SHARED, function)
        _must(driver.cuFuncSetCacheConfig(function, PREFER_SHARED), "load", code.name)
        status = driver.cuFuncSetAttribute(function, DYNAMIC_SHARED, most - own)
        _must(status, "load", code.name)
    return int(function.value or 0)


MOST_SHARED, MOST_THREADS, STATIC_SHARED, DYNAMIC_SHARED, PREFER_SHARED = 97, 0, 1, 8, 1
"""Numbers of the driver's API: attributes of devices and functions, and a cache preference."""

DEFAULT_SHARED = 48 * 1024
"""Bytes of shared memory that a function may use by default."""


def _enter_context() -> None:
    """Make the primary context of the current device, which torch uses, current in this thread."""
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
