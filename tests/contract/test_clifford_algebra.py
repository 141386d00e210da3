"""Algebras: blades, paths and the Cayley table, against products computed letter by letter.

Seen red with: the metric's signs left out, blades in the order of their bit masks, paths as
(left, right, out), a sign of the reordering dropped.
"""

import itertools
import pickle

import pytest
import torch

from tests.cases.clifford import METRICS
from torchweft.clifford import Algebra
from torchweft.errors import DTypeError, ShapeError

MIXED = (*METRICS, (), (0,), (0, 0, 0), (1, 0, -1), (-1, 0, 1, -1, 1))


def words(n):
    """The blades as sorted tuples of basis vectors, shortest first."""
    return [w for grade in range(n + 1) for w in itertools.combinations(range(n), grade)]


def multiply(left, right, metric):
    """(sign, word) of e_left e_right: neighbours swapped until sorted, then equal ones squared."""
    word, sign = [*left, *right], 1
    while any(a >= b for a, b in itertools.pairwise(word)):
        for i, (a, b) in enumerate(itertools.pairwise(word)):
            if a > b:
                word[i : i + 2], sign = [b, a], -sign
                break
            if a == b:
                word[i : i + 2], sign = [], sign * metric[a]
                break
    return sign, tuple(word)


@pytest.mark.parametrize("metric", MIXED, ids=str)
def test_the_table_is_the_product_of_blades(metric):
    algebra, blades = Algebra(metric), words(len(metric))
    expected = torch.zeros(3 * (len(blades),), dtype=torch.int8)
    for (i, left), (k, right) in itertools.product(enumerate(blades), repeat=2):
        sign, word = multiply(left, right, metric)
        expected[i, blades.index(word), k] = sign
    torch.testing.assert_close(algebra.cayley(torch.int8), expected, rtol=0, atol=0)
    assert algebra.grades == tuple(map(len, blades))
    occur = {tuple(len(blades[b]) for b in at) for at in expected.nonzero().tolist()}
    assert algebra.paths == tuple(sorted(occur))


@pytest.mark.parametrize(
    ("metric", "paths", "nonzero"),
    [
        ((1, 1), 10, 16),
        ((1, 1, 1), 20, 64),
        ((1, -1, -1, -1), 35, 256),
        ((1, 1, 1, 1), 35, 256),
        ((0, 1, 1, 1), 34, 192),
        ((1, 1, 1, 1, 1), 56, 1024),
        ((1, 1, 1, 1, -1), 56, 1024),
    ],
    ids=str,
)
def test_counts(metric, paths, nonzero):
    algebra = Algebra(metric)
    assert len(algebra.paths) == paths
    assert len(algebra.terms) == int(algebra.cayley().count_nonzero()) == nonzero


def test_the_order_of_blades_and_of_paths():
    algebra = Algebra((1, 1, 1))
    assert [f"{blade:03b}"[::-1] for blade in algebra.blades] == [
        "000", "100", "010", "001", "110", "101", "011", "111",
    ]  # fmt: skip
    assert Algebra((1, 1)).paths == (
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 1), (1, 1, 0),
        (1, 1, 2), (1, 2, 1), (2, 0, 2), (2, 1, 1), (2, 2, 0),
    )  # fmt: skip


def test_cl_puts_null_vectors_first():
    assert Algebra.cl(3, 0, 1).metric == (0, 1, 1, 1)
    assert Algebra.cl(2, 1, 2).metric == (0, 0, 1, 1, -1)
    assert Algebra.cl(1, 3).metric == (1, -1, -1, -1)


def test_algebras_are_values():
    algebra = Algebra((0, 1, 1, 1))
    assert algebra == Algebra([0, 1.0, 1, 1]) == pickle.loads(pickle.dumps(algebra))
    assert algebra != Algebra((1, 1, 1, 0))
    assert len({algebra, Algebra.cl(3, 0, 1), Algebra((1, 1))}) == 2
    assert eval(repr(algebra), {"Algebra": Algebra}) == algebra
    assert [Algebra(m).is_definite for m in ((1, 1), (-1,), (), (1, -1), (0, 1))] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("metric", [(1, 2), (0.5,), (1, "1"), (float("nan"),), (None, 1)])
def test_metrics_that_are_none(metric):
    with pytest.raises(ShapeError, match=r"metric is .* must be -1, 0 or 1, not .*Scale"):
        Algebra(metric)


@pytest.mark.parametrize("counts", [(-1,), (2, -1), (2, 0, 0.5)])
def test_counts_that_are_none(counts):
    """Seen red with -1 taken for 0."""
    with pytest.raises(ShapeError, match=r"[pqr] is -?[0-9.]+: .* at least 0\. Pass Algebra\.cl"):
        Algebra.cl(*counts)


def test_a_number_is_no_metric():
    with pytest.raises(DTypeError, match=r"metric is 3: .* each basis vector\. Pass .*cl\(3\)"):
        Algebra(3)


@pytest.mark.parametrize("metric", METRICS)
def test_squares_are_of_the_reverse_times_the_blade(metric):
    """Vector by vector, descending and then ascending; seen red with the sign of conjugation."""
    algebra = Algebra(metric)
    for mask, square in zip(algebra.blades, algebra.squares, strict=True):
        vectors = [1 << i for i in range(algebra.n) if mask >> i & 1]
        blade, sign = 0, 1
        for vector in [*reversed(vectors), *vectors]:
            sign *= algebra.sign(blade, vector)
            blade ^= vector
        assert (blade, sign) == (0, square)
