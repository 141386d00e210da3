"""wigner_3j and wigner_D: closed forms, invariance, signs, the group's law; equal to e3nn's.

The 3j symbol of a triple is unique up to its sign, so invariance, norm and SIGNS determine it.

Seen red with: m1 and m2 exchanged in Racah's sum; the phase i^(l3-l1-l2) left out; entries of odd
orders √2 too large; Z turning backwards; β and γ exchanged; degree 5 of wigner_D_matrices scaled;
a table handed out, or kept from inference mode; shapes not looked at; generators of axes
exchanged, or with the sign or the factor of the transposed table; a lower spin by one step.
"""

import contextlib
import itertools
import math
import sys
from decimal import Decimal

import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps import wigner
from torchweft.testing import assert_within_bound
from torchweft.testing.doors import assert_same_bits

FLOAT = torch.float64
LMAX = 6
TRIPLES = [
    (a, b, c)
    for a, b in itertools.product(range(LMAX + 1), repeat=2)
    for c in range(abs(a - b), min(a + b, LMAX) + 1)
]
SIGNS = (
    "++++++++++-+--+--+--+--+-+++-+--+++--+++--+++--++--+++-++--++--+++-+--++-+--+++-"
    "-++++-++--+++--+++--++--+--++-+--+++++-++--++--+++--+++--++--+--++-+++++-++--++-"
    "-+++--+++--++--"
)
"""Of the first entry that is not zero, for each triple; e3nn's."""


def symbol(*degrees):
    return o3.wigner_3j(*degrees, dtype=FLOAT)


def exactly(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@contextlib.contextmanager
def float64():
    """As torch's default dtype."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(FLOAT)
    yield
    torch.set_default_dtype(old)


def angles(*shape, seed=0):
    torch.manual_seed(seed)
    return o3.rand_angles(*shape, dtype=FLOAT)


def root(p, q):
    """√(p/q), rounded once: 1/√3 in floats is not."""
    return float((Decimal(p) / q).sqrt())


def test_closed_forms():
    eye = torch.eye(3, dtype=FLOAT)
    exactly(symbol(0, 0, 0), torch.ones(1, 1, 1, dtype=FLOAT))
    exactly(symbol(1, 1, 0)[:, :, 0], eye * root(1, 3))
    exactly(symbol(2, 0, 2)[:, 0], torch.eye(5, dtype=FLOAT) * root(1, 5))
    cross = torch.zeros(3, 3, 3, dtype=FLOAT)
    for order, sign in zip(itertools.permutations(range(3)), (1, -1, -1, 1, 1, -1), strict=True):
        cross[order] = sign
    exactly(symbol(1, 1, 1), cross * root(1, 6))
    assert symbol(1, 1, 2)[0, 2, 0] == root(1, 10)
    assert symbol(1, 1, 2)[1, 1, 2] == root(2, 15)


@pytest.mark.parametrize("triple", [*TRIPLES, (11, 10, 9), (8, 11, 5)], ids=str)
def test_invariant(triple):
    table = symbol(*triple)
    turns = [o3.wigner_D(degree, *angles(4)) for degree in triple]
    sides = "ijk,zil,zjm,zkn->zlmn"
    moved = torch.einsum(sides, table, *turns)
    size = torch.einsum(sides, table.abs(), *(turn.abs() for turn in turns))
    terms = math.prod(table.shape)
    assert_within_bound(moved, table.expand_as(moved), size, terms, stored=3)


@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_orthogonal_and_symmetric(triple):
    table = symbol(*triple)
    for axes in itertools.permutations(range(3)):
        degrees = [triple[i] for i in axes]
        odd = axes in {(0, 2, 1), (1, 0, 2), (2, 1, 0)} and sum(triple) % 2
        exactly(symbol(*degrees), table.permute(axes) * (-1 if odd else 1) + 0.0)
    gram = torch.einsum("ijk,ijn->kn", table, table) * table.shape[2]
    eye = torch.eye(table.shape[2], dtype=FLOAT)
    size = torch.einsum("ijk,ijn->kn", table.abs(), table.abs()) * table.shape[2]
    assert_within_bound(gram, eye, size, terms=table.shape[0] * table.shape[1], stored=1)


def test_signs():
    firsts = (next(v for v in symbol(*triple).flatten().tolist() if v) for triple in TRIPLES)
    assert "".join("+" if v > 0 else "-" for v in firsts) == SIGNS


def test_entries():
    entries = wigner.entries_3j(2, 3, 4)
    table = torch.zeros(5, 7, 9, dtype=FLOAT)
    for i, j, k, value in entries:
        assert value
        table[i, j, k] = value
    exactly(symbol(2, 3, 4), table)
    assert list(entries) == sorted(entries)


def test_a_table_is_the_callers_own():
    o3.wigner_3j(1, 2, 3).zero_()
    assert o3.wigner_3j(1, 2, 3).any()
    assert o3.wigner_3j(1, 2, 3).dtype == torch.float32
    assert o3.wigner_3j(1, 2, 3, dtype=torch.float16).dtype == torch.float16
    assert o3.wigner_3j(1, 2, 3, device="meta").is_meta
    with torch.inference_mode():
        o3.wigner_D(7, *angles(1))
    x = angles(1)[0].requires_grad_()
    o3.wigner_D(7, x, x, x).sum().backward()


def test_tables_up_to_six_are_made_at_once():
    """In a tenth of a second, or some 190,000 calls: these are counted, as nothing delays them.

    Seen red with each coefficient computed once for every order of l3.
    """
    calls = itertools.count()
    before = sys.getprofile()
    wigner.entries_3j.cache_clear()
    sys.setprofile(lambda frame, event, _: event == "call" and next(calls))
    try:
        for triple in TRIPLES:
            wigner.entries_3j(*triple)
    finally:
        sys.setprofile(before)
    assert next(calls) < 300_000


@pytest.mark.parametrize("degree", range(12))
def test_d_represents_rotations(degree):
    first, second = angles(5), angles(5, seed=1)
    one, two = o3.wigner_D(degree, *first), o3.wigner_D(degree, *second)
    both = o3.wigner_D(degree, *o3.compose_angles(*first, *second))
    terms = 2 * degree + 1
    assert_within_bound(both, one @ two, one.abs() @ two.abs(), terms, stored=6 * degree)
    eye = torch.eye(2 * degree + 1, dtype=FLOAT).expand_as(one)
    assert_within_bound(one @ one.mT, eye, one.abs() @ one.mT.abs(), terms, stored=3)
    assert_within_bound(
        o3.wigner_D(degree, *o3.inverse_angles(*first)), one.mT, eye + 1, terms, stored=3
    )
    matrices = wigner.wigner_D_matrices(degree, o3.angles_to_matrix(*first))
    assert len(matrices) == degree + 1
    assert_within_bound(matrices[degree], one, torch.ones_like(one), terms, stored=2 * degree)


def test_degree_one_is_the_matrix():
    turns = angles(5)
    matrix = o3.angles_to_matrix(*turns)
    assert_within_bound(o3.wigner_D(1, *turns), matrix, torch.ones_like(matrix), terms=3)


def test_d_about_the_polar_axis():
    """D(Ry(α)) turns components -m and m into each other by the angle mα."""
    alpha, zero = torch.tensor(0.3, dtype=FLOAT), torch.zeros((), dtype=FLOAT)
    order = torch.arange(-3, 4)
    expected = torch.diag((order * alpha).cos()) - torch.diag((order * alpha).sin()).flip(-1)
    for given in ((alpha, zero, zero), (zero, zero, alpha)):
        assert_within_bound(o3.wigner_D(3, *given), expected, torch.ones(7, 7), terms=7, stored=1)


@pytest.mark.parametrize("degree", range(12))
def test_generators_are_the_first_order_of_d(degree):
    """About x, y and z; a turn about z is one about y, carried there and back."""
    zero = torch.zeros((), dtype=FLOAT)
    quarter = zero + math.pi / 2
    about = (
        lambda t: o3.wigner_D(degree, zero, t, zero),
        lambda t: o3.wigner_D(degree, t, zero, zero),
        lambda t: o3.wigner_D(degree, -quarter, t, quarter),
    )
    with float64():
        found = o3.so3_generators(degree)
    for k, turn in enumerate(about):
        slope = torch.func.jacfwd(turn)(zero)
        size = torch.full_like(slope, 2 * degree + 1)
        assert_within_bound(found[k], slope, size, terms=2 * degree + 1, stored=4)


@pytest.mark.parametrize("spin", [0, 0.5, 1, 1.5, 2, 2.5])
def test_generators_of_spins(spin):
    """[X_0, X_1] = X_2 in a circle, Σ X² = -j (j + 1), X_1 diagonal."""
    with float64():
        found = o3.su2_generators(spin)
    assert (found.dtype, found.shape) == (torch.complex128, (3, *2 * (round(2 * spin) + 1,)))
    size = torch.full(found.shape[1:], (spin + 1) ** 2, dtype=FLOAT)
    for k in range(3):
        a, b, c = found[k], found[(k + 1) % 3], found[(k + 2) % 3]
        difference = torch.view_as_real(a @ b - b @ a - c)
        assert_within_bound(difference, torch.zeros_like(difference), size[..., None], terms=9)
    casimir = torch.view_as_real((found @ found).sum(0))
    expected = torch.view_as_real(-spin * (spin + 1) * torch.eye(len(size)) + 0j)
    assert_within_bound(casimir, expected, size[..., None], terms=9)
    exactly(found[1].imag, torch.diag(torch.arange(-spin, spin + 1, dtype=FLOAT)))


@pytest.mark.parametrize("beta", [0.0, 0.7, math.pi])
def test_gradients_of_d(beta):
    given = torch.tensor([[0.4, -2.0], [beta, beta], [9.0, 0.0]], dtype=FLOAT, requires_grad=True)

    def function(a):
        return o3.wigner_D(3, *a)

    def of_matrix(a):
        return wigner.wigner_D_matrices(4, o3.angles_to_matrix(*a))[4]

    for f in (function, of_matrix):
        torch.autograd.gradcheck(f, given, check_forward_ad=True)
        torch.autograd.gradgradcheck(f, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_d_in_narrow_types(dtype):
    turns = [a.to(dtype) for a in angles(20)]
    exact = o3.wigner_D(4, *(a.double() for a in turns))
    found = o3.wigner_D(4, *turns)
    assert found.dtype == dtype
    # an angle up to 2π, times the order, is rounded in float32
    assert_within_bound(found, exact, torch.full_like(exact, 8 * math.pi), terms=9, stored=0)


def test_compile_export_and_vmap():
    def function(a, b, c):
        matrices = wigner.wigner_D_matrices(3, o3.angles_to_matrix(a, b, c))
        return o3.wigner_D(3, a, b, c) + matrices[3] + o3.wigner_3j(1, 2, 3, dtype=FLOAT).sum()

    class Module(torch.nn.Module):
        def forward(self, *given):
            return function(*given)

    given = angles(4)
    expected = function(*given)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same_bits(compiled(*given), expected, "compiled")
    assert_same_bits(torch.export.export(Module(), given).module()(*given), expected, "exported")
    mapped = torch.func.vmap(function)(*given)
    assert_within_bound(mapped, expected, torch.ones_like(expected), terms=49, stored=1)


def test_broadcast_and_empty():
    a, b, c = angles(3)
    assert o3.wigner_D(2, a[:, None], b, c[0]).shape == (3, 3, 5, 5)
    assert o3.wigner_D(2, a[:0], b[:0], c[:0]).shape == (0, 5, 5)


def test_errors():
    with pytest.raises(ShapeError, match=r"degrees 1 and 2 do not couple to 4.*from 1 to 3"):
        o3.wigner_3j(1, 2, 4)
    with pytest.raises(ShapeError, match="l2 is -2: a degree must be 0 or more"):
        o3.wigner_3j(1, -2, 1)
    with pytest.raises(DTypeError, match=r"l is 1\.5: a degree must be an integer"):
        o3.wigner_D(1.5, *angles(1))
    with pytest.raises(DTypeError, match=r"a tensor is torch\.int64: coordinates and angles"):
        o3.wigner_D(1, *[torch.ones(3, dtype=torch.int64)] * 3)
    with pytest.raises(ShapeError, match=r"alpha \(2,\), beta \(3,\), gamma \(2,\) do not broad"):
        o3.wigner_D(1, torch.ones(2), torch.ones(3), torch.ones(2))
    with pytest.raises(ShapeError, match="l is -1: a degree must be 0 or more"):
        o3.so3_generators(-1)
    for spin in (-0.5, 0.3):
        with pytest.raises(ShapeError, match=f"j is {spin}: a spin must be half an integer"):
            o3.su2_generators(spin)


def test_equal_to_e3nn():
    from e3nn import o3 as theirs

    for triple in [*TRIPLES, (11, 11, 11), (8, 11, 5)]:
        expected = theirs.wigner_3j(*triple, dtype=FLOAT)
        assert_within_bound(symbol(*triple), expected, expected.abs(), terms=1, stored=9)
    turns = angles(5)
    with float64():  # theirs rounds to it
        for degree in range(12):
            expected = theirs.wigner_D(degree, *turns)
            size = torch.full_like(expected, 2 * degree + 1)  # of their matrix exponential
            assert_within_bound(o3.wigner_D(degree, *turns), expected, size, terms=9, stored=9)
            expected = theirs.so3_generators(degree)
            size = torch.full_like(expected, 2 * degree + 1)
            assert_within_bound(o3.so3_generators(degree), expected, size, terms=9, stored=9)
            expected = torch.view_as_real(theirs.su2_generators(degree / 2))
            found = torch.view_as_real(o3.su2_generators(degree / 2))
            assert_within_bound(found, expected, expected.abs(), terms=1, stored=9)
