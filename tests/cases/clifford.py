"""Contract cases of clifford: every operation in every kind of algebra.

Definite, mixed and degenerate metrics, one to five basis vectors; several batch dimensions,
blades first and last, B = 0, F = 1 and odd F; rounding judged by the computed bound where the
operation is a polynomial of its inputs, else by plain PyTorch.
"""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from typing import Any

import torch
from torch import Tensor

from tests.cases.clifford_ops import OPS, Unsigned
from tests.cases.suite import Suite
from torchweft import clifford
from torchweft.clifford import Algebra
from torchweft.testing.contract import Case, assert_same_bits

__all__ = ["METRICS", "door_cases", "make_case", "op_cases", "suite"]

METRICS = (
    (-1,),
    (1, 1),
    (1, 1, 1),
    (1, -1, -1, -1),
    (0, 1, 1, 1),
    (1, 1, 1, 1, -1),
    (1, 1, 1, 1, 1),
)
"""Cl(0,1), Cl(2,0), Cl(3,0), space-time, projective, conformal and five Euclidean dimensions."""


def _call(
    op: str, last: bool, *inputs: Tensor | None, backend: str | None = None, **options: Any
) -> Tensor:
    """The public function; with `last`, on blades behind the features, there and back."""
    function, names, *_ = OPS[op]
    arguments: dict[str, Any] = dict(zip(names, inputs, strict=True))
    if "backend" in inspect.signature(function).parameters:
        options["backend"] = backend
    if not last:
        return function(**arguments, **options)
    for name in {"x", "y", "r"} & set(names):
        arguments[name] = arguments[name].movedim(0, -1)
    return function(**arguments, **options, blade_dim=-1).movedim(-1, 0)


def _oracle(op: str, *inputs: Tensor | None, **options: Any) -> Tensor:
    return OPS[op].oracle(*inputs, **options)


def _magnitude(op: str, *inputs: Tensor | None, algebra: Algebra, **options: Any) -> Tensor:
    return OPS[op].oracle(*inputs, algebra=Unsigned(algebra.metric), **options)


def make_case(
    op: str,
    metric: tuple[int, ...],
    *,
    batch: tuple[int, ...] = (7,),
    features: tuple[int, int] = (5, 4),
    last: bool = False,
) -> Case:
    """A case of an op with random inputs.

    Args:
        op: a key of `OPS`.
        metric: of the algebra.
        batch: the dimensions between blades and features.
        features: F, and the F_out of the ops that have one.
        last: whether the call sees the blades in the last dimension.
    """
    algebra = Algebra(metric)
    signature = "".join("-0+"[square + 1] for square in metric)
    name = f"{op} {signature}, batch {batch}, F={features[0]}{', blades last' if last else ''}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = OPS[op]
    sizes = dict(zip("FGPN", (*features, len(algebra.paths), algebra.n + 1), strict=True))
    shapes = {
        "weight": tuple(sizes[axis] for axis in found.weight),
        "bias": features[1:],
        **dict.fromkeys("rxy", (algebra.num_blades, *batch, features[0])),
    }
    inputs = tuple(
        torch.randn(shapes[argument], dtype=torch.float64, generator=generator)
        for argument in found.arguments
    )
    if op == "norm":  # a root: far from null vectors
        inputs[0][0] += 2 * math.sqrt(algebra.num_blades)
    return Case(
        name,
        functools.partial(_call, op, last),
        functools.partial(_oracle, op),
        inputs,
        {"algebra": algebra, **found.options},
        factors=found.factors,
        magnitude=functools.partial(_magnitude, op),
        polynomial=found.polynomial,
        together=True,
        neighbours=16,
    )


ROWS = 61
"""Rows of cases that plain PyTorch judges: two samples of its noise must be alike."""


def op_cases(op: str) -> list[Case]:
    """One op in every algebra."""
    elements = 64 if OPS[op].polynomial else 8 * ROWS
    return [make_case(op, m, batch=(max(elements >> len(m), 5),)) for m in METRICS]


def layout_cases() -> list[Case]:
    """Sizes at the edge and batches of every rank, for the ops with bodies of their own."""
    found = []
    for op in ("geometric", "weighted", "fully connected", "chain metric", "chain euclidean"):
        make = functools.partial(make_case, op, (1, 1, 1))
        rows = 4 * ROWS  # F = 1 leaves one number a row
        found += [
            make(batch=(0,)),
            make(batch=(), features=(33, 32)),
            make(batch=(rows,), features=(1, 1)),
            make(batch=(3, 1, 19), features=(33, 31)),
            make(batch=(5, 13), features=(8, 8), last=True),
            make(batch=(9,), features=(128, 64)),
            make_case(op, (0, 1, 1, 1), batch=(2, 31), features=(3, 7), last=True),
        ]
    return found + long_cases()


def long_cases() -> list[Case]:
    """Rows that no tile of a kernel holds, aligned for wide copies; the last tile is short."""
    return [
        *(
            make_case(op, (1, 1, 1), batch=(5,), features=(2064, 1))
            for op in ("weighted", "chain euclidean")
        ),
        make_case("chain euclidean", (1, 1, 1, 1, 1), batch=(5,), features=(528, 1)),
    ]


def door_cases() -> list[Case]:
    """A small case of each op that torch's machinery enters by a door of its own."""
    make = functools.partial(make_case, metric=(1, 1), batch=(7,), features=(3, 2))
    return [
        make("geometric"),
        make("weighted"),
        make("fully connected"),
        make("wedge"),
        make("grade_linear"),
        make("chain euclidean"),
        make("chain metric"),
        make("chain fully connected euclidean"),
    ]


def small_cases() -> list[Case]:
    """Every op, small enough for numerical gradients."""
    return [make_case(op, (1, -1), batch=(3,), features=(2, 3)) for op in OPS]


def check_large_offsets(device: str) -> None:
    """Offsets past 2^31 elements: the last rows equal those of a small call."""
    algebra, rows, features = Algebra((1, 1, 1)), 2**19 + 8, 512
    generator = torch.Generator(device).manual_seed(0)
    randn = functools.partial(torch.randn, dtype=torch.float16, device=device, generator=generator)
    y, weight = randn(8, 1, features), randn(features, len(algebra.paths))
    x = torch.zeros(8, rows, features, dtype=torch.float16, device=device)
    x[:, -4:] = tail = randn(8, 4, features)
    call = functools.partial(
        clifford.gelu_geometric_product_norm, weight=weight, algebra=algebra, backend="triton"
    )
    large = call(x, y.expand(-1, rows, -1))
    assert_same_bits(large[:, -4:].contiguous(), call(tail, y.expand(-1, 4, -1)), "the last rows")


@functools.cache
def suite() -> Suite:
    """The clifford part of `make check`."""
    full = [
        make_case(op, metric, batch=(ROWS,), features=(6, 3))
        for op in ("weighted", "fully connected", "chain metric", "chain fully connected euclidean")
        for metric in ((1, 1), (0, 1, 1, 1))
    ]
    own = ("geometric", "weighted", "fully connected", "chain euclidean", "chain metric")
    cases = [case for op in own for case in op_cases(op)] + layout_cases()
    single = [case for op in OPS if op not in own for case in op_cases(op)]
    return Suite(cases, full, small_cases(), door_cases(), (check_large_offsets,), single)
