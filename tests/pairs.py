"""Formulas, data and blocks of pairs for tests of executors, and what the matrix of pairs says."""

import torch

from torchweft.reductions.call import Blocks, Options, ReductionData, Sizes
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.node import const, node, swap, var
from torchweft.testing.bounds import assert_as_accurate, plain_error

X, Y, B, P, A = var(0, 3, 0), var(1, 3, 1), var(2, 2, 1), var(3, 1, 2), var(4, 1, 0)
DIMS = {0: (3, 0), 1: (3, 1), 2: (2, 1), 3: (1, 2), 4: (1, 0)}
PLAIN = Options()
DISTANCE = node("sqdist", X, Y)
GAUSSIAN = node("exp", -(DISTANCE * P))


def of(op, *args, data=None):
    return node(op, *args, data=data)


def part(f, k):
    return of("extract", f, data=(k, 1))


# functions are of one component: a loop of three compiles for longer, and shows nothing more
U, V = part(X, 0), part(Y, 0)
POSITIVE = of("abs", U - V) + 0.5
UNIT = 0.9 * of("sin", U + V)  # asin and acos are steep at ±1

SUMS = {
    "gaussian": GAUSSIAN * B,
    "gradient": of("expand", A, data=3) * GAUSSIAN * of("expand", part(B, 0), data=3) * (X - Y),
    "rows outside": X * GAUSSIAN,
    "columns alone": B,
    "rows alone": A * P,
    "parameter alone": P,
    "number": const(2.5) + 0 * A,
    "many components": of("concat", X * part(Y, 0), Y * P, GAUSSIAN * B, X - Y),
    "laplacian": of("exp", -of("sqrt", DISTANCE)) * part(B, 1),
    "cauchy": of("reciprocal", DISTANCE * P + 1),
    "quotients": (U - V) / (POSITIVE + P) + U / POSITIVE + V / 3,
    "logarithm": of("log", POSITIVE) + of("xlogx", POSITIVE) + of("sinxdivx", U - V),
    "angles": of("cos", U * V) + of("asin", UNIT) + of("acos", UNIT) + of("atan", U - V),
    "atan2": of("atan2", U - V, U + V),
    "roots": of("sqrt", POSITIVE) + of("rsqrt", POSITIVE) + of("rsqrt", 0 * U + 0 * V),
    "powers": of("pow", U - V, data=5) + of("pow", POSITIVE, data=-2),
    "real powers": of("powf", POSITIVE, A * 0.5 + part(Y, 1)),
    "steps": of("sign", U - V) + of("step", U - V) + of("floor", 3 * U - V),
    "rounded": of("round", 3 * (U - V), data=0) + of("round", U + V, data=1),
    "comparisons": of("less", U, V) - of("less_equal", V, U) * 0.5 + of("equal", U, U + 0 * V),
    "choice": of("ifelse", U - V, const(1.25), V) + of("ifelse", V - U, const(0.75), const(-0.1)),
    "vectors": of("concat", of("sum", X * Y), of("extract", X - Y, data=(1, 2))),
    "placed": of("place", X * Y, data=(1, 5)),
    "products": of("einsum", X * Y, B, data=((3,), "a", (2,), "b", "ba")),
    "best": of("argmin", X - Y) + of("argmax", X * Y) * 10,
    "one hot": of("one_hot", 2 * of("abs", part(X, 0) - part(Y, 0)), data=3) * part(B, 0),
    "swapped": swap(GAUSSIAN * A),
}

SHIFTED = {
    "plain": (part(B, 0) - 2 * DISTANCE * P, const(1)),
    "weights of columns": (-DISTANCE, B),
    "weights of pairs": (X_Y := part(X, 0) * part(Y, 1), of("concat", X, X - Y, const(1) + B)),
    "exponent of columns": (part(B, 1), A),
    "exponent of rows": (A, part(B, 1)),
}

COMPARED = {
    "distance": DISTANCE,
    "components": X - Y,
    "ties": of("floor", 2 * (part(X, 0) + part(Y, 1))),
    "all equal": A,
    "columns": part(B, 0),
}

BLOCKS = {
    "holes": ([[2, 5], [7, 12]], [[1, 4], [4, 9], [11, 17]], [[1, 1, 0], [0, 1, 1]]),
    "any order": ([[9, 17], [0, 6]], [[10, 17], [0, 3], [2, 2]], [[1, 1, 1], [0, 1, 1]]),
    "lists that touch": ([[0, 5], [5, 17]], [[0, 6], [6, 17]], [[1, 0], [0, 1]]),
    "overlaps": ([[0, 17]], [[5, 12], [0, 9]], [[1, 1]]),
    "empty lists": ([[0, 4], [4, 17]], [[0, 17]], [[0], [0]]),
    "no blocks": ([], [[0, 17]], []),
    "no intervals": ([[0, 17]], [], [[]]),
}


def blocks(name):
    rows, columns, keep = BLOCKS[name]
    starts, ends = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2).unbind(1)
    kept = [columns[q] for listed in keep for q, there in enumerate(listed) if there]
    first, last = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).unbind(1)
    counts = torch.tensor([0, *(sum(listed) for listed in keep)])
    return Blocks(
        starts.contiguous(),
        ends.contiguous(),
        counts.cumsum(0),
        *(t.contiguous() for t in (first, last)),
    )


def data(batch, rows, columns, dtype=torch.float32, seed=0):
    """Values of all variables: rows in a batch, columns shared, parameters positive."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for index, (dim, cat) in DIMS.items():
        shape = (1 if index == 1 else batch, (rows, columns, 1)[cat], dim)
        found[index] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    found[3] = found[3].abs() + 0.25
    return found


def counts(sizes, listed):
    """(M, N): how often each pair is listed."""
    if listed is None:
        return torch.ones(sizes.rows, sizes.columns, dtype=torch.int64)
    found = torch.zeros(sizes.rows, sizes.columns, dtype=torch.int64)
    for c in range(len(listed.starts)):
        for q in range(int(listed.indptr[c]), int(listed.indptr[c + 1])):
            j = slice(int(listed.j_starts[q]), int(listed.j_ends[q]))
            found[int(listed.starts[c]) : int(listed.ends[c]), j] += 1
    return found


def dense(f, values, sizes, dtype):
    """f of all pairs, (B, M, N, f.dim)."""
    at = {0: lambda v: v[:, :, None], 1: lambda v: v[:, None], 2: lambda v: v[:, :, None]}
    cats = {index: cat for index, (_, cat) in DIMS.items()}
    if f is SUMS["swapped"]:
        cats = {index: (1, 0, 2)[cat] for index, cat in cats.items()}
    given = {index: at[cats[index]](v.to(dtype)) for index, v in values.items()}
    return evaluate(f, given).expand(sizes.batch, sizes.rows, sizes.columns, f.dim)


def noise_of(plain, exact, magnitude, dtype):
    """That of plain torch, and at least one rounding of the terms: of few sums it may be none."""
    wide = torch.promote_types(dtype, torch.float32)
    return plain_error(plain, exact, dtype).maximum(magnitude * torch.finfo(wide).eps / 2)


def check_sums(run, f, values, sizes, listed=None, options=PLAIN):
    found = run(f, ReductionData(values, sizes, listed, options))
    kind = values[0].dtype
    assert found.dtype == kind
    assert found.shape == (sizes.batch, sizes.rows, f.dim)
    often = counts(sizes, listed)[None, :, :, None]
    terms, plain_terms = (
        often * dense(f, values, sizes, d) for d in (torch.float64, torch.float32)
    )
    exact, magnitude = terms.sum(2), terms.abs().sum(2)
    # few sums: the noise of plain torch is known better from more than one order of the pairs
    orders = (plain_terms, plain_terms.flip(2), plain_terms.roll(1, 2))
    noise = [noise_of(plain.sum(2), exact, magnitude, kind) for plain in orders]
    assert_as_accurate(found, exact, torch.stack(noise))
    return found


def check_shifted(run, f, w, values, sizes, listed=None, options=PLAIN, roundings=1):
    """Scores may be rounded to so many units of round-off."""
    top, found = run(f, w, ReductionData(values, sizes, listed, options))
    kind = torch.promote_types(values[0].dtype, torch.float32)
    assert top.shape == (sizes.batch, sizes.rows, 1)
    assert found.shape == (sizes.batch, sizes.rows, w.dim)
    often = counts(sizes, listed)[None, :, :, None]
    results = []
    for dtype in (torch.float64, torch.float32):
        score, weight = (dense(e, values, sizes, dtype) for e in (f, w))
        score = score.masked_fill(often == 0, -torch.inf)
        m = score.amax(2) if sizes.columns else score.new_full(top.shape, -torch.inf)
        shift = torch.where(m.isfinite(), m, 0)
        terms = often * (score - shift[:, :, None]).exp() * weight
        rounded = terms.abs() * (
            1 + roundings * score.abs()
        )  # a rounded score moves its exponential so much
        results.append((m, terms.sum(2), rounded.nan_to_num(nan=0).sum(2)))
    (m, exact, magnitude), (plain_m, plain, _) = results
    there = m.isfinite()
    assert bool((top.isfinite() == there).all())
    size = m.abs()[there]
    if roundings > 1:
        size = size.maximum((roundings - 1) * score.abs().amax())
    noise = noise_of(plain_m[there], m[there], size, kind)
    wide = top.dtype if options.accumulate == "float64" else kind
    assert top.dtype == found.dtype == wide
    assert_as_accurate(top[there].to(kind), m[there], noise)
    assert_as_accurate(found.to(kind), exact, noise_of(plain, exact, magnitude, kind))


def check_smallest(run, f, k, values, sizes, listed=None):
    """Scores are those of the dtype in which they are computed: distances must not be too close."""
    found = run(f, k, ReductionData(values, sizes, listed, PLAIN))
    assert found.dtype == torch.int64
    wide = torch.promote_types(values[0].dtype, torch.float32)
    score = dense(f, values, sizes, wide)
    often = counts(sizes, listed)
    expected = torch.full((sizes.batch, sizes.rows, k, f.dim), -1)
    for i in range(sizes.rows):
        j = torch.arange(sizes.columns).repeat_interleave(often[i])
        order = score[:, i, j].sort(dim=1, stable=True).indices[:, :k]
        expected[:, i, : order.shape[1]] = j[order]
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


SIZES = [Sizes(1, 1, 1), Sizes(2, 17, 300), Sizes(1, 300, 17), Sizes(1, 0, 17), Sizes(1, 17, 0)]
SMALL = Sizes(2, 17, 17)
