"""Gaussian-like sums of vectors on tensor cores: one exponential a pair for all components.

    f_ij = concat of  exp(exponent) · r_i · c_j    and    exp(exponent) · r_i · c_j · (u_i − v_j)

where |u − v|² is the exponent's.  The sums need the columns C = [c, c v] alone,

    S_i = Σ_j exp(exponent) C_j,      Σ_j f_ij = r_i S_i    or    r_i (u_i S_i[c] − S_i[c v])

with u and v less the centre, so gradients of a sum are sums of this kind.  A few columns are added
up pair by pair (a product of tf32 parts would be as fast, and err by eight times the noise of
plain sums: tensor cores cut digits off at every step); many are a second product, P @ C, in
bfloat16 parts of 24 bits: six products.  Where the bound of tensor_cores fails, or one of many
columns has numbers that are not finite or too large for parts, the guard leaves all to the kernel
of differences.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Tile,
    compile_together,
    current_device,
    launch_all,
)
from torchweft.core.printing.modules import written
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import Moments
from torchweft.reductions.formula.node import Node, const
from torchweft.reductions.gpu import gaussian_products as tensor_cores
from torchweft.reductions.gpu.gaussian_products import SUMS, Operands, Split, is_split

__all__ = ["sums"]

FEW = 4
"""Columns that are added up pair by pair."""

MOST = 64
"""Columns of one product."""

WIDEST = 512
"""Columns for which exponentials are computed again and again."""

LARGEST = 2.0**100
"""Numbers that parts can be made of."""

TILES = {
    ("few", True): Tile((64, 64, 32), 4, 3, registers=128),
    ("few", False): Tile((64, 64, 32), 4, 2, registers=128),
    ("many", True): Tile((64, 64, 16), 4, 2),
    ("many", False): Tile((64, 64, 16), 4, 2),
}
"""Of few and many columns, for products of parts and for others."""


def sums(
    f: Moments, values: Mapping[int, Tensor], sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor] | None:
    """(B, M, f.dim), and the guard that says if it holds; None for too many columns."""
    batch, rows, columns = sizes
    names: dict[tuple[Node, bool], int] = {}
    for t in f.terms:
        names.setdefault((t.columns, False), t.columns.dim)
        if t.sign:
            names.setdefault((t.columns, True), f.exponent.left.dim)
    count = sum(names.values())
    if count > WIDEST:
        return None
    one = Split(f.exponent, const(1), const(1))
    tile = TILES[("few" if count <= FEW else "many", is_split(one))]
    made = tensor_cores.operands(one, values, sizes, tile.blocks[1], SUMS, "tf32x3")
    like = next(iter(values.values()))

    def of(node: Node, length: int) -> Tensor:
        return evaluate(node, values).to(like).expand(batch, length, node.dim)

    v = of(f.exponent.right, columns)
    centre = tensor_cores.centre_of(v)
    found = [of(c, columns) * (v - centre if turned else 1) for c, turned in names]
    weights = pad(torch.cat(found, -1), (0, 0, 0, made.columns.shape[1] - columns)) * made.columns
    summed = _summed(made, weights, tile, rows)
    apart = torch.split(summed * made.rows, list(names.values()), -1)
    at = dict(zip(names, apart, strict=True))
    u = of(f.exponent.left, rows) - centre
    results = []
    for t in f.terms:
        s = at[t.columns, False]
        moment = t.sign * (u * s - at[t.columns, True]) if t.sign else s
        results.append(of(t.rows, rows) * moment)
    return torch.cat(results, -1), made.guard


def _summed(made: Operands, weights: Tensor, tile: Tile, rows: int) -> Tensor:
    """(B, M, E): P @ C."""
    batch, columns, count = weights.shape
    few, parts = count <= FEW, made.x.dim() - 2
    block = count if few else min(MOST, max(16, 1 << (count - 1).bit_length()))
    blocks = -(-count // block)
    checks = made.checks
    if few:
        stored = weights.transpose(1, 2).contiguous()
    else:
        stored = _parts(pad(weights, (0, blocks * block - count)))
        checks = (*checks, *tensor_cores.within([weights], LARGEST, made.guard))
    out = weights.new_empty(batch, blocks * block, rows)
    tiles = -(-rows // tile.blocks[0])
    constants = (made.width, parts, block)
    with current_device(weights):
        kernel = _kernel(few, constants, tile, weights.device)
        given = [made.x, made.y, stored, made.guard, out]
        numbers = (rows, columns, tiles, blocks)
        calls = [Call(check.launcher.kernel, check.operands) for check in checks]
        compile_together([Call(kernel, given, numbers), *calls])
        launch_all(checks)
        kernel(batch * tiles * blocks, given, numbers, out.nbytes + stored.nbytes)
    return out[:, :count].transpose(1, 2)


@functools.lru_cache(maxsize=256)
def _kernel(few: bool, constants: tuple[int, ...], tile: Tile, _: torch.device) -> Kernel:
    """Compiled code belongs to a device."""
    name = f"{'few' if few else 'many'}_moments_kernel"
    return Kernel(
        written("torchweft.reductions.gpu.gaussian_moments_kernels", name), (), constants, tile
    )


def _parts(a: Tensor) -> Tensor:
    """(3, ...) bfloat16 whose sum is a float32."""
    high = a.bfloat16()
    middle = (a - high.float()).bfloat16()
    low = (a - high.float() - middle.float()).bfloat16()
    return torch.stack((high, middle, low))
