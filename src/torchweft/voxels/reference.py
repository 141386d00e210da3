"""The oracle: torch's dense convolution where torch has one, and dictionaries for the maps.

Plain torch for any dtype, differentiable.  Never used by a fast path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ReferenceMap", "conv", "dense_conv", "pairs_of"]


def conv(
    x: Tensor, weight: Tensor, sources: Tensor, bias: Tensor | None = None, groups: int = 1
) -> Tensor:
    """y[o] = bias + Σ_k x[sources[k,o]] @ weight[k]

    Args:
        x: (N_in, C_in).
        weight: (K, C_in/groups, C_out).
        sources: (K, N_out), −1 for none.
        bias: (C_out,).
        groups: of channels.
    """
    places = sources.flatten().long()
    places = torch.where(places < 0, len(x), places)  # −1 is the row of zeros
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, places)
    rows = rows.reshape(*sources.shape, groups, weight.shape[1])
    matrices = weight.reshape(*weight.shape[:2], groups, weight.shape[2] // groups)
    y = torch.einsum("kogc,kcgd->ogd", rows, matrices).flatten(1)
    return y if bias is None else y + bias


def dense_conv(
    x: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    mode: str = "submanifold",
) -> Tensor:
    """The dense convolution of torch, of (batch, C_in, *shape) in one to three dimensions.

    Args:
        x: the features on the grid, 0 where there is no voxel.
        weight: (K, C_in/groups, C_out), K row-major over the kernel's axes.
        kernel_size: one number per axis, as the next three.
        stride: 1 in mode "submanifold".
        padding: unused in mode "submanifold", which is torch's padding="same".
        dilation: distance of neighbouring kernel positions.
        groups: of channels.
        mode: "submanifold", "strided" or "transposed".
    """
    turned = "_transpose" if mode == "transposed" else ""
    function = getattr(torch.nn.functional, f"conv{turned}{len(kernel_size)}d")
    kernel = weight.permute(2, 1, 0)  # (C_out, C_in/groups, K)
    if mode == "transposed":
        outer = kernel.shape[0] // groups  # torch has (C_in, C_out/groups, …)
        kernel = kernel.reshape(groups, outer, *kernel.shape[1:]).transpose(1, 2).flatten(0, 1)
    kernel = kernel.reshape(*kernel.shape[:2], *kernel_size).contiguous()
    options = {"stride": tuple(stride), "dilation": tuple(dilation), "groups": groups}
    result: Tensor = function(
        x, kernel, padding="same" if mode == "submanifold" else tuple(padding), **options
    )
    return result


class ReferenceMap(NamedTuple):
    """A kernel map: the output voxels, and for each offset the pairs of rows that meet."""

    outputs: list[tuple[int, ...]]
    pairs: list[list[tuple[int, int]]]  # (input row, output row), by output row

    def sources(self) -> Tensor:
        """(K, N_out) int32."""
        table = torch.full((len(self.pairs), len(self.outputs)), -1, dtype=torch.int32)
        for row, pairs in zip(table, self.pairs, strict=True):
            q, o = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
            row[o] = q.int()
        return table


def pairs_of(
    coords: Sequence[Sequence[int]],
    kernel_size: Sequence[int],
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    mode: str = "submanifold",
    spatial_shape: Sequence[int] | None = None,
) -> ReferenceMap:
    """The map of a layer in any number of dimensions, voxel by voxel.

    Args:
        coords: distinct (batch, s0, s1, …).
        kernel_size: of the layer, see `dense_conv`.
        stride: of the layer.
        padding: of the layer; unused in mode "floor", which centres odd kernels.
        dilation: of the layer.
        mode: "submanifold", "strided", "transposed" or "floor".
        spatial_shape: of the input; None is the box [0, max + 1).
    """
    voxels = [tuple(c) for c in coords]
    places = list(itertools.product(*(range(k) for k in kernel_size)))
    shape = spatial_shape or [
        1 + max((v[1 + a] for v in voxels), default=-1) for a in range(len(kernel_size))
    ]
    axes = list(zip(kernel_size, stride, padding, dilation, shape, strict=True))

    def output(voxel: tuple[int, ...], place: tuple[int, ...]) -> tuple[int, ...] | None:
        found = [voxel[0]]
        for q, j, (k, s, p, dil, size) in zip(voxel[1:], place, axes, strict=True):
            if mode == "submanifold":
                found.append(q - j * dil + (k - 1) * dil // 2)
                continue
            if mode == "floor":
                o, rest = divmod(q + (k // 2 * dil if k % 2 else 0) - j * dil, s)
                if rest:
                    return None
                found.append(o)
                continue
            if mode == "strided":
                o, rest = divmod(q + p - j * dil, s)
                last = (size + 2 * p - dil * (k - 1) - 1) // s
            else:
                o, rest = q * s - p + j * dil, 0
                last = (size - 1) * s - 2 * p + dil * (k - 1)
            if rest or not 0 <= o <= last:
                return None
            found.append(o)
        return tuple(found)

    met = [[(q, output(voxel, place)) for q, voxel in enumerate(voxels)] for place in places]
    reached = sorted({o for pairs in met for _, o in pairs if o is not None})
    if mode == "floor":
        steps = (1, *stride)
        reached = sorted({tuple(c // s for c, s in zip(v, steps, strict=True)) for v in voxels})
    outputs = voxels if mode == "submanifold" else reached
    row = {voxel: o for o, voxel in enumerate(outputs)}
    pairs = [sorted(((q, row[o]) for q, o in of if o in row), key=lambda p: p[1]) for of in met]
    return ReferenceMap(outputs, pairs)
