"""Launch Triton kernels with little work on the host: a compiled kernel is found by its own key.

Triton's launcher binds, inspects and hashes every argument at every call.  A kernel's machine
code depends on less: dtypes, whether pointers and strides are multiples of 16, and constants.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted

__all__ = ["Tile", "launch"]

INT32_MAX = 2**31 - 1


class Tile(NamedTuple):
    """Block sizes of a kernel in the order of its last parameters, and how it is compiled."""

    blocks: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 3


_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    constants: tuple[Any, ...],
    tile: Tile,
) -> None:
    """Run `kernel[(programs,)](*tensors, *counts, *strides, *constants, *tile.blocks)`.

    Args:
        kernel: a jitted function whose parameters have this order.
        programs: how many, all along grid axis 0; zero launches nothing.
        tensors: on one GPU; None is a table that is not there.
        counts: integers the kernel does not specialise on.
        strides: integers that it does specialise on: 1 and multiples of 16 are compiled in.
        constants: its leading constexprs.
        tile: the trailing ones, warps and stages.
    """
    if programs == 0:
        return
    constants = (*constants, *tile.blocks)
    if interpreted():
        kernel[(programs,)](*tensors, *counts, *strides, *constants)
        return
    device = next(t for t in tensors if t is not None).device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(
                kernel, programs, tensors, counts, strides, constants[: -len(tile.blocks)], tile
            )
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    key = (
        kernel,
        device,
        constants,
        tile,
        *[None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
        *[(s == 1, s % 16 == 0) for s in strides],
        *[n > INT32_MAX for n in (*counts, *strides)],
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](
            *tensors,
            *counts,
            *strides,
            *constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    else:
        compiled[(programs, 1, 1)](*pointers, *counts, *strides, *constants)
