"""Contract cases of symmetric contractions: x and a weight a degree and irrep of the output."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.cases.suite import Suite
from torchweft.core.backend import BACKENDS
from torchweft.o3 import Irrep, Irreps, SymmetricContraction, wigner_3j
from torchweft.o3.irreps.irreps import join, split
from torchweft.testing.contract import Case

__all__ = ["couplings", "make_case", "suite"]

Functions = list[tuple[Irrep, Tensor]]
Layers = dict[str | None, SymmetricContraction]

ELEMENTS = 5
"""Of which the first and the last have no row."""


def _call(
    x: Tensor, *weights: Tensor, element: Tensor, layers: Layers, backend: str | None = None
) -> Tensor:
    layer = layers[backend]
    if x.is_cuda and not layer.table.is_cuda:
        layer.cuda()  # once: a captured graph may copy nothing from the host
    names = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    given = dict(zip(names, weights, strict=True)) | {"table": layer.table.to(x.device)}
    z: Tensor = torch.func.functional_call(layer, given, (x, element))
    return z


def _oracle(x: Tensor, *weights: Tensor, element: Tensor, layers: Layers) -> Tensor:
    """Σ_k w[element, k] f_k(x), the f_k coupled one after the other from the left."""
    layer = layers[None]
    features = split(x, layer.irreps_in, layer.layout)
    first = [(item.ir, f) for item, f in zip(layer.irreps_in, features, strict=True)]
    powers = list(couplings(first, layer.correlation))
    rest, blocks = iter(weights), []
    for mul, ir in layer.irreps_out:
        total = x.new_zeros(x.shape[0], mul, ir.dim)
        for functions in reversed(powers):
            found = [value for other, value in functions if other == ir]
            if found:
                w = next(rest).index_select(0, element)
                total = total + torch.einsum("nkc,kncm->ncm", w, torch.stack(found))
        blocks.append(total)
    return join(blocks, layer.layout)


def couplings(first: Functions, correlation: int) -> Iterator[Functions]:
    """Of each degree the couplings from the left, in MACE's order: (N, C, 2l+1) each."""
    found = first
    for degree in range(1, correlation + 1):
        yield found
        if degree < correlation:
            found = [_coupled(a, b, ir) for a in found for b in first for ir in a[0] * b[0]]
            found.sort(key=lambda function: function[0])


def _coupled(
    first: tuple[Irrep, Tensor], second: tuple[Irrep, Tensor], ir: Irrep
) -> tuple[Irrep, Tensor]:
    (a, x), (b, y) = first, second
    table = wigner_3j(a.l, b.l, ir.l, x.dtype, x.device) * ir.dim**0.5
    return ir, torch.einsum("nca,ncb,abm->ncm", x, y, table)


def make_case(
    name: str, items: str, outs: str, correlation: int, channels: int, rows: int, layout: str
) -> Case:
    """A case with random inputs; rows are not sorted by element.

    Args:
        name: of the case; it seeds everything.
        items: the irreps of a channel of x, each once.
        outs: those of the result.
        correlation: the highest degree.
        channels: copies of each.
        rows: N.
        layout: of x and z.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    randn = functools.partial(torch.randn, dtype=torch.float64, generator=generator)
    irreps, out = (
        str(Irreps([(channels, item.ir) for item in Irreps(text)])) for text in (items, outs)
    )
    layers: Layers = {
        backend: SymmetricContraction(
            irreps, out, correlation, ELEMENTS, layout=layout, backend=backend
        )
        for backend in (None, *BACKENDS)
    }
    layer = layers[None]
    weights = [randn(p.shape) for p in layer.parameters() if p.requires_grad]
    element = torch.randint(1, ELEMENTS - 1, (rows,), generator=generator)
    tables = {"element": element, "layers": layers}
    inputs = randn(rows, layer.irreps_in.dim), *weights
    return Case(
        f"symmetric_contraction: {name}", _call, _oracle, inputs, tables,
        polynomial=False, together=True, factors=1,
    )  # fmt: skip


@functools.cache
def suite() -> Suite:
    """The part of `make check` of symmetric contractions."""
    cases = [
        make_case("cubic", "0e+1o+2e", "0e+1o", 3, 3, 9, "mul_ir"),
        make_case("to l = 2", "0e+1o", "0e+1o+2e", 3, 33, 9, "ir_mul"),
        make_case("other parity", "0e+1e+1o", "0o+1e", 2, 5, 9, "ir_mul"),
        make_case("quadratic, mul_ir", "0e+1o", "0e+1o", 2, 40, 9, "mul_ir"),
        make_case("linear", "0e+1o", "1o", 1, 8, 9, "ir_mul"),
        make_case("no row", "0e+1o", "0e", 2, 4, 0, "ir_mul"),
        make_case("one channel, one row", "0e+1o", "0e+1o", 3, 1, 1, "mul_ir"),
    ]
    single = [make_case("mace", "0e+1o+2e+3o", "0e+1o", 3, 3, 150, "ir_mul")]
    full = [make_case("full", "0e+1o", "0e", 3, 3, 21, "mul_ir")]
    small = [make_case("small", "0e+1o", "0e+1o", 2, 2, 4, "ir_mul")]
    doors = [make_case("door", "0e+1o", "0e", 3, 2, 5, "ir_mul")]
    return Suite(cases, full, small, doors, (), single)
