"""Gaussian-like reductions that products on tensor cores take: which, in what tiles, and how.

They answer with a guard, on the device, that says whether the bound of tensor_cores holds, and with
what is to be launched first: pairs follow where it does not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import Launcher, Queued, Tile, processors
from torchweft.core.printing.modules import Jitted, written
from torchweft.reductions.call import Blocks, Options, Sizes
from torchweft.reductions.formula import kernel_forms as exponents
from torchweft.reductions.formula.node import Node, const
from torchweft.reductions.gpu import gaussian_moments as moments
from torchweft.reductions.gpu import gaussian_products as tensor_cores
from torchweft.reductions.gpu.tiles import BLOCK

__all__ = ["PRODUCTS", "allowed", "may_serve", "shifted", "sums", "vectors"]

Values = Mapping[int, Tensor]

PRODUCTS = {
    "split": Tile((64, 128, BLOCK), 4, 3),
    "three": Tile((128, 128, BLOCK), 8, 2),
    "three, wide": Tile((128, 64, BLOCK), 4, 1),
    "three, no wgmma": Tile((64, 32, BLOCK), 8, 1),
    "one": Tile((128, 64, BLOCK), 4, 3),
    "one, wide": Tile((128, 128, BLOCK), 8, 2),
}
"""The tiles of products on tensor cores."""

ROWS = 256
"""Rows for each processor from which the rows alone make enough programs."""

COLUMNS = 2**12
"""Columns from which products are worth their preparation."""


def sums(
    f: Node,
    values: Values,
    out: Tensor,
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
) -> tuple[Any, ...]:
    """For a Gaussian times numbers the guard, and the launches."""
    if not may_serve(values, sizes, blocks, options):
        return ()
    found = tensor_cores.split(f)
    return () if found is None else _launch("sums", found, values, [out], sizes, options)


def shifted(
    f: Node,
    w: Node,
    values: Values,
    results: Sequence[Tensor],
    sizes: Sizes,
    blocks: Blocks | None,
    options: Options,
) -> tuple[Any, ...]:
    """For a squared distance as exponent the guard, and the launch."""
    if not may_serve(values, sizes, blocks, options):
        return ()
    exponent = exponents.exponent(f)
    if exponent is None or w.dim > 1 or not w.cats <= {1, 2}:
        return ()
    found = tensor_cores.Split(exponent, const(1), w)
    return _launch("shifted", found, values, results, sizes, options)


def vectors(
    f: Node, values: Values, sizes: Sizes, blocks: Blocks | None, options: Options
) -> tuple[Tensor, Tensor] | None:
    """For a Gaussian times vectors the sums, and the guard that says if they hold."""
    of = exponents.moments(f) if f.dim > 1 else None
    if of is None or not may_serve(values, sizes, blocks, options):
        return None
    return moments.sums(of, values, sizes)


def allowed(values: Values, blocks: Blocks | None, options: Options) -> bool:
    """Whether a call may use products."""
    plain = blocks is None and options.accumulate == "auto" and options.precision != "ieee"
    single = all(v.dtype == torch.float32 for v in values.values())
    return plain and single and torch.version.hip is None


def may_serve(values: Values, sizes: Sizes, blocks: Blocks | None, options: Options) -> bool:
    """Whether rows alone make enough programs, and columns pay for the preparation."""
    device = next(iter(values.values())).device
    enough = sizes.batch * sizes.rows >= ROWS * processors(device) and sizes.columns >= COLUMNS
    return enough and allowed(values, blocks, options)


def _launch(
    kind: str,
    found: tensor_cores.Split,
    values: Values,
    results: Sequence[Tensor],
    sizes: Sizes,
    options: Options,
) -> tuple[Any, ...]:
    asked = options.precision or "tf32x3"
    shape = PRODUCTS[_way(found, asked, results[0].device)]
    most = tensor_cores.SUMS if kind == "sums" else tensor_cores.SHIFTED
    if options.precision is not None:
        most = float("inf")
    made = tensor_cores.operands(found, values, sizes, shape.blocks[1], most, asked)
    weighted = kind == "shifted" and found.columns is not const(1)
    mixes = tensor_cores.is_split(found) and options.precision is None and not weighted
    constants: tuple[Any, ...] = (weighted,) if kind == "shifted" else ()
    among: tuple[tensor_cores.Operands, ...] = (made,)
    if kind == "sums" and made.a is not None:
        among = tensor_cores.narrowed(made)  # the few additions of exponents take half the time
    queued = [_queued(kind, m, constants, mixes, results, sizes, shape) for m in among]
    return made.guard, *among[0].checks, *queued


def _queued(
    kind: str,
    made: tensor_cores.Operands,
    constants: tuple[Any, ...],
    mixes: bool,
    results: Sequence[Tensor],
    sizes: Sizes,
    shape: Tile,
) -> Queued:
    kernel = written("torchweft.reductions.gpu.kernels", f"split_{kind}_kernel")
    rows = [made.rows] if kind == "sums" else []
    constants = (*constants, made.width, made.a is not None, made.x.dim() - 2, mixes)
    tiles = -(-sizes.rows // shape.blocks[0])
    numbers = (sizes.rows, made.y.shape[1], tiles)
    device = results[0].device
    launcher = _product(kernel, sizes.batch * tiles, numbers, constants, shape, device)
    given = [made.x, made.y, made.a, made.b, *rows, made.columns, made.guard, *results]
    room = sum(t.nbytes for t in made if isinstance(t, Tensor))
    return Queued(launcher, given, room)


@functools.lru_cache(maxsize=4096)
def _product(
    kernel: Jitted,
    programs: int,
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    shape: Tile,
    _: torch.device,
) -> Launcher:
    """Launches products; compiled code belongs to a device."""
    return Launcher(kernel, programs, (), numbers, constants, shape)


def _way(found: tensor_cores.Split, asked: str, device: torch.device) -> str:
    """The key of PRODUCTS."""
    if tensor_cores.is_split(found):
        return "split"
    wide = ", wide" if found.exponent.left.dim > exponents.WIDEST // 2 else ""
    if asked != "tf32x3":
        return f"one{wide}"
    if not interpreted() and torch.cuda.get_device_capability(device) < (9, 0):
        return "three, no wgmma"
    return f"three{wide}"
