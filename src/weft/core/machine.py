"""Compile Triton kernels, and launch their machine code by the driver itself.

Triton builds a C extension for every signature of a kernel: a fifth of a second of gcc each, in
the first process.  The driver needs the addresses of the arguments alone, which `struct` lays out
in less time than an extension takes to read them.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.errors import BackendError

__all__ = ["Run", "layout", "machine_code"]

Run = Callable[[int, int, Sequence[Any]], None]
"""(programs, stream, values): launch with all arguments in their order, tensors as addresses."""

SLOT = 8
"""Bytes between arguments: of the largest."""

KNOWN = "3.6."
"""Triton whose machine code takes its arguments and two scratch pointers behind; see `layout`."""

SCRATCH = 2

FORMATS = {
    "i1": "b7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q",
    "u1": "B7x", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q",
    "fp32": "f4x", "fp64": "d", "*": "Q",
}  # fmt: skip
"""A slot of each type, as `struct` writes it."""


def machine_code(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Run:
    """Compile a kernel for arguments like these, on the current device.

    Later values must be None, aligned to 16 bytes or equal to 1 where these are, as the kernel's
    own specialisation says; constants are handed over and passed by.
    """
    code = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    found = layout(code)
    return _by_triton(code) if found is None else _by_driver(code, *found)


def layout(code: Any) -> tuple[list[int], str] | None:
    """(the arguments that compiled code takes, their slots); None: only Triton knows how."""
    import triton

    meta = code.metadata
    plain = (
        triton.__version__.startswith(KNOWN)
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
    """Memory for the arguments of one call; a call owns it until the driver has read it."""

    __slots__ = ("addresses", "buffer")

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(SLOT * size)
        begin = ctypes.addressof(self.buffer)
        self.addresses = (ctypes.c_void_p * size)(*(begin + SLOT * i for i in range(size)))


def _by_driver(code: Any, taken: Sequence[int], slots: str) -> Run:
    function, shared = _loaded(code)
    launch, threads = _driver().cuLaunchKernel, 32 * code.metadata.num_warps
    pack, take = struct.Struct(slots).pack_into, operator.itemgetter(*taken)
    size = len(taken) + SCRATCH  # no kernel of this kind has scratch: null pointers
    handle, idle = ctypes.c_void_p(function), [_Frame(size)]

    def run(programs: int, stream: int, values: Sequence[Any]) -> None:
        # threads that launch at once take frames of their own
        try:
            frame = idle.pop()
        except IndexError:
            frame = _Frame(size)
        pack(frame.buffer, 0, *take(values))
        at = ctypes.c_void_p(stream)
        failed = launch(handle, programs, 1, 1, threads, 1, 1, shared, at, frame.addresses, None)
        idle.append(frame)
        if failed:
            raise _refused(code.name, failed)

    return run


def _by_triton(code: Any) -> Run:
    """Through Triton's own launcher, without its hooks for profilers."""
    run = code.run  # loads the code
    settled = (code.function, code.packed_metadata, None, None, None)

    def launch(programs: int, stream: int, values: Sequence[Any]) -> None:
        run(programs, 1, 1, stream, *settled, *values)

    return launch


def _loaded(code: Any) -> tuple[int, int]:
    """The function's handle on the current device, and the bytes of shared memory it needs.

    Raises:
        OutOfResources: of Triton, where a block needs more than the device has.
    """
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    device, shared = torch._C._cuda_getDevice(), code.metadata.shared
    utils = driver.active.utils
    most = utils.get_device_properties(device)["max_shared_mem"]
    if shared > most:
        raise OutOfResources(shared, most, "shared memory")
    _, function, _, _, threads = utils.load_binary(code.name, code.kernel, shared, device)
    if 32 * code.metadata.num_warps > threads:
        raise OutOfResources(32 * code.metadata.num_warps, threads, "threads")
    return function, shared


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _refused(name: str, status: int) -> BackendError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    said = (text.value or b"unknown error").decode()
    return BackendError(
        f"the driver refused to launch {name} (error {status}: {said}): launches need a device "
        "without an earlier error. Run with CUDA_LAUNCH_BLOCKING=1 to find the first one."
    )
