"""Instructions: shapes of weights, factors in every normalisation, how they are computed, errors.

Seen red with: path_weight outside the root, terms of the path alone under "element", the number of
paths left out under "path", copies of z in another order, a cut that two blocks of z share.
"""

import math

import pytest

from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3 import Irreps
from torchweft.o3.tensor_product.instructions import (
    MODES,
    UNROLLED_COPIES,
    Operands,
    instructions_of,
    structures_of,
    weight_sizes,
)

SHAPES = {
    "uvw": ("2x1o", "3x1o", "4x0e", (2, 3, 4), 6),
    "uvu": ("2x1o", "3x1o", "2x0e", (2, 3), 3),
    "uvv": ("2x1o", "3x1o", "3x0e", (2, 3), 2),
    "uuw": ("3x1o", "3x1o", "4x0e", (3, 4), 3),
    "uuu": ("3x1o", "3x1o", "3x0e", (3,), 1),
    "uvuv": ("2x1o", "3x1o", "6x0e", (2, 3), 1),
    "uvu<v": ("4x1o", "4x1o", "6x1e", (6,), 1),
    "u<vw": ("4x1o", "4x1o", "5x1e", (6, 5), 6),
}
"""The shape of the weight, and the terms that one number sums."""


def made(in1, in2, out, given, **options):
    return instructions_of(given, Operands(Irreps(in1), Irreps(in2), Irreps(out)), **options)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_and_terms(mode):
    in1, in2, out, shape, terms = SHAPES[mode]
    (found,) = made(in1, in2, out, [(0, 0, 0, mode, True)], irrep_normalization="none")
    assert found.path_shape == shape
    assert found.path_weight == math.sqrt(1 / terms)


@pytest.mark.parametrize(
    ("normalization", "numerators"),
    [("component", (1, 1, 3)), ("norm", (9, 1, 3)), ("none", (1, 1, 1)), (None, (1, 1, 3))],
)
@pytest.mark.parametrize("paths", ["element", "path", "none", None])
def test_factors(normalization, numerators, paths):
    """√(a · out_var · path_weight / S), S by hand."""
    given = [
        (1, 1, 0, "uvu", True),
        (0, 0, 0, "uvu", True, 0.5),
        (0, 1, 1, "uvu", True, 2),
        (0, 0, 0, "uuu", True, 0.0),
    ]
    in1_var, in2_var, out_var = (2.0, 3.0), (5.0, 7.0), (11.0, 13.0)
    found = made(
        "3x0e+3x1o",
        "3x0e+2x1o",
        "3x0e+3x1o",
        given,
        in1_var=in1_var,
        in2_var=in2_var,
        out_var=out_var,
        irrep_normalization=normalization,
        path_normalization=paths,
    )
    own = [3 * 7 * 2, 2 * 5 * 3, 2 * 7 * 2, 2 * 5]
    sums = {
        "element": [own[0] + own[1] + own[3]] * 2 + [own[2], own[0] + own[1] + own[3]],
        "path": [3 * own[0], 3 * own[1], own[2], 3 * own[3]],
        "none": [1, 1, 1, 1],
    }[paths or "element"]
    weights, variances = (1, 0.5, 2, 0), (11, 11, 13, 11)
    for n, instruction in enumerate(found):
        a = (*numerators, numerators[1])[n]
        exact = math.sqrt(a * variances[n] * weights[n] / sums[n])
        assert math.isclose(instruction.path_weight, exact, rel_tol=4 * 2**-52)


def test_nothing_to_sum_leaves_the_factor():
    (found,) = made("0x0e", "0x0e", "0x0e", [(0, 0, 0, "uvw", True)])
    assert (found.path_weight, weight_sizes([found])) == (1.0, [0])
    assert structures_of([found], Operands(*3 * [Irreps("0x0e")])).every == ()


def parts(in1, in2, out, given, layout="mul_ir"):
    operands = Operands(Irreps(in1), Irreps(in2), Irreps(out))
    return structures_of(instructions_of(given, operands), operands, layout)


def test_one_structure_for_what_shares_its_cut():
    found = parts(
        "4x0e+4x1o",
        "0e+1o",
        "4x0e+4x1o",
        [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (1, 0, 1, "uvu", True)],
    )
    (structure,) = found.direct
    assert structure.widths == (16, 4, 16, 12)
    (product,) = structure.products
    assert product.channels == 4
    assert [path.w for path in product.paths] == [0, 1, 2]
    assert found.mixed is None
    assert found.dense == ()


def test_one_product_for_each_number_of_channels():
    found = parts("4x0e+2x1o", "0e", "4x0e+2x1o", [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True)])
    assert [p.channels for p in found.direct[0].products] == [4, 2]


def test_weighted_and_other_paths_are_apart_and_so_are_cuts():
    found = parts(
        "4x0e",
        "2x0e",
        "8x0e+4x0e",
        [(0, 0, 0, "uvuv", True), (0, 0, 1, "uvu", True), (0, 0, 1, "uvu", False)],
    )
    assert [s.weighted for s in found.direct] == [True, False]
    in1, in2, out = "4x0e+8x0e", "2x0e", "8x0e"
    found = parts(in1, in2, out, [(0, 0, 0, "uvuv", True), (1, 0, 0, "uvu", True)])
    assert len(found.direct) == 2


def test_many_copies_are_not_written_out():
    few, many = UNROLLED_COPIES, UNROLLED_COPIES + 1
    assert not parts("16x0e", f"{few}x0e", "16x0e", [(0, 0, 0, "uvu", True)]).dense
    assert parts("16x0e", f"{many}x0e", "16x0e", [(0, 0, 0, "uvu", True)]).dense == (0,)
    # the factor with more copies has the channels
    assert not parts("2x0e", "64x0e", "128x0e", [(0, 0, 0, "uvuv", True)]).dense


def test_columns_of_what_is_mixed_lie_side_by_side():
    found = parts("2x0e+3x1o", "0e+1o", "4x0e", [(0, 0, 0, "uvw", True), (1, 1, 0, "uvw", True)])
    (columns,) = found.mixed.outputs
    assert columns == (0, 0, 5, ((0, 0), (1, 2)))
    assert not found.mixed.structure.weighted


BAD = {
    "triangle": (
        [(0, 0, 0, "uvu", True)],
        ("2x1o", "1x1o", "2x3e"),
        ShapeError,
        "instruction 0 puts 2x1o ⊗ 1x1o into 2x3e: the product holds 0e, 1e, 2e. Choose",
    ),
    "parity": (
        [(0, 0, 0, "uvu", True)],
        ("2x1o", "1x1o", "2x1o"),
        ShapeError,
        "into 2x1o: the product holds 0e, 1e, 2e",
    ),
    "copies": (
        [(0, 0, 0, "uvu", True)],
        ("2x1o", "3x1o", "3x0e"),
        ShapeError,
        "by uvu: the output must have 2 copies, not 3. Write 2x0e",
    ),
    "pairs": (
        [(0, 0, 0, "uuu", True)],
        ("2x1o", "3x1o", "2x0e"),
        ShapeError,
        "pairs the copies of both factors, 2 and 3, which must be as many. Use uvw",
    ),
    "weights": (
        [(0, 0, 0, "uvw", False)],
        ("2x1o", "3x1o", "2x0e"),
        ShapeError,
        "by uvw without weights: they say how copies mix. Set has_weight",
    ),
    "mode": (
        [(0, 0, 0, "uwu", True)],
        ("2x1o", "3x1o", "2x0e"),
        ShapeError,
        "the mode 'uwu': it must be one of uvw, uvu",
    ),
    "item": (
        [(0, 1, 0, "uvw", True)],
        ("2x1o", "3x1o", "2x0e"),
        IndexRangeError,
        "names item 1 of irreps_in2, which has 1: 3x1o. Pass an index from 0 to 0",
    ),
    "form": (
        [(0, 0, "uvw")],
        ("2x1o", "3x1o", "2x0e"),
        DTypeError,
        r"it must be \(i_in1, i_in2, i_out, mode, has_weight\)",
    ),
    "negative": (
        [(0, 0, 0, "uvw", True, -1.0)],
        ("2x1o", "3x1o", "2x0e"),
        ShapeError,
        "path_weight -1.0: its root is taken, so that it must be 0 or more. Put the sign",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    given, irreps, error, text = BAD[name]
    with pytest.raises(error, match=text):
        made(*irreps, given)


def test_errors_of_options():
    given = [(0, 0, 0, "uvw", True)]
    with pytest.raises(ShapeError, match="in2_var has 2 numbers but the irreps 3x1o have 1 items"):
        made("2x1o", "3x1o", "2x0e", given, in2_var=[1, 2])
    with pytest.raises(ShapeError, match="path_normalization is 'all': it must be one of element"):
        made("2x1o", "3x1o", "2x0e", given, path_normalization="all")
