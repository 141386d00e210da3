"""Contract cases of the o3 layers that act irrep by irrep, in every sharing over N."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft import o3
from torchweft.testing.contract import Case

__all__ = ["suite"]

IRREPS = "2x0e+1o+0o+2e"
INFO = o3.irreps_info(IRREPS)

SHAPES = {
    "tensor_dot_uu": (("D", "C"), ("D", "C")),
    "gating": (("D", "C"), ("I", "C")),
    "irrep_wise_linear": (("D", "C"), ("I", "C", "F")),
}
"""Each input behind N: D components, I irreps, C and F channels."""


def _call(
    name: str,
    x: Tensor,
    y: Tensor,
    irrep_index: Tensor,
    irrep_seg: Tensor,
    backend: str | None = None,
    **options: bool,
) -> Tensor:
    """The layer, with tables that are on the device of the case."""
    dims = irrep_seg.diff().double()
    info = o3.IrrepsInfo(dims.rsqrt(), 1 / dims, irrep_index, irrep_seg, INFO.num_irreps)
    layer: Callable[..., Tensor] = getattr(o3, name)
    return layer(x, y, info, backend=backend, **options)


def _oracle(name: str, x: Tensor, y: Tensor, scaled: bool = True, **tables: Tensor) -> Tensor:
    """Irrep by irrep, with dense sums."""
    slices = [slice(*INFO.irrep_seg[i : i + 2].tolist()) for i in range(INFO.num_irreps)]
    if name == "tensor_dot_uu":
        terms = [x[..., s, :] * y[..., s, :] for s in slices]
        roots = [t.shape[-2] ** -0.5 if scaled else 1 for t in terms]
        return torch.stack([r * t.sum(-2) for r, t in zip(roots, terms, strict=True)], -2)
    if name == "gating":
        return torch.cat([x[..., s, :] * y[..., i, None, :] for i, s in enumerate(slices)], -2)
    return torch.cat([x[..., s, :] @ y[..., i, :, :] for i, s in enumerate(slices)], -2)


def _cases(name: str, channels: tuple[int, ...], batch: int = 3) -> Iterator[Case]:
    for i, channel in enumerate(channels):
        for shared in ("nn", "ns", "sn", "ss")[i % 2 :: 2]:
            sizes = {"D": INFO.irrep_index.numel(), "I": INFO.num_irreps, "C": channel, "F": 5}
            label = f"{name}: {shared}, N={batch}, C={channel}"
            generator = torch.Generator().manual_seed(len(label) + channel)
            x, y = (
                torch.randn(
                    *([batch] if has_n == "n" else []),
                    *(sizes[d] for d in dims),
                    dtype=torch.float64,
                    generator=generator,
                )
                for has_n, dims in zip(shared, SHAPES[name], strict=True)
            )
            call, oracle = functools.partial(_call, name), functools.partial(_oracle, name)
            tables = {"irrep_index": INFO.irrep_index, "irrep_seg": INFO.irrep_seg}
            yield Case(label, call, oracle, (x, y), tables)


@functools.cache
def suite() -> Suite:
    """The o3 layers' part of `make check`."""
    found = [case for name in SHAPES for case in _cases(name, (1, 8, 31, 64, 65))]
    found += [case for name in SHAPES for case in _cases(name, (3, 3), batch=0)]
    dots = list(_cases("tensor_dot_uu", (16,)))
    found += [
        replace(case, name=f"{case.name}, unscaled", tables={**case.tables, "scaled": False})
        for case in dots
    ]
    small = [case for name in SHAPES for case in _cases(name, (2, 2))]
    full = [case for name in SHAPES for case in _cases(name, (4,))]
    return Suite(found, full, small, full[::4], ())
