"""The error bound lets rounding pass and nothing else.

Seen red with: u_out·|exact| alone, the mean ratio for the worst one, NaN ignored, RMS or maximum
of the errors left out, the rounding of the result counted or allowed twice, stored results
not allowed for, memory not filled; in float64 1, 1.25 and 2 times the noise for 1.5.
"""

import pytest
import torch

from torchweft.testing import (
    assert_as_accurate,
    assert_within_bound,
    bound_ratio,
    plain_error,
    poisoned_memory,
)

SIZES = [(7, 1), (300, 5), (4000, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem(terms, rows, dtype, seed=0):
    """Sums of products in the accumulator's dtype: (result, exact, S, K)."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, terms, generator=generator).to(dtype) for _ in range(2))
    out = (x.float() * y.float()).sum(1).to(dtype)
    products = x.double() * y.double()
    return out, products.sum(1), products.abs().sum(1), terms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("terms", "rows"), SIZES)
def test_rounding_passes(terms, rows, dtype):
    for seed in range(20):
        assert 0 <= assert_within_bound(*problem(terms, rows, dtype, seed)) <= 1


def last_row_zero(out):
    out[-1] = 0
    return out


def one_off_by_two_percent(out):
    out[len(out) // 2] *= 1.02
    return out


def one_is_nan(out):
    out[0] = float("nan")
    return out


@pytest.mark.parametrize(
    "bug", [lambda out: out * 1.01, last_row_zero, one_off_by_two_percent, one_is_nan]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bugs_do_not(bug, dtype):
    out, *rest = problem(300, 50, dtype)
    with pytest.raises(AssertionError, match=r"element \(\d+,\) of \(50,\) is .* times its bound"):
        assert_within_bound(bug(out), *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_do_not(dtype):
    x, y = (torch.randn(1000, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    out = torch.zeros(1, dtype=dtype)
    for term in x * y:
        out += term
    products = x.double() * y.double()
    with pytest.raises(AssertionError, match="times its bound"):
        assert_within_bound(out, products.sum()[None], products.abs().sum()[None], 1000)


def test_silent_tf32_does_not_and_declared_tf32_does():
    x, y = (torch.randn(64, 256, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    narrow = [(a.view(torch.int32) & ~0x1FFF).view(torch.float32) for a in (x, y)]
    out = (narrow[0] * narrow[1]).sum(1)
    products = x.double() * y.double()
    exact, magnitude = products.sum(1), products.abs().sum(1)
    with pytest.raises(AssertionError, match="times its bound"):
        assert_within_bound(out, exact, magnitude, 256)
    assert_within_bound(out, exact, magnitude, 256, tf32=True)


def test_factors_that_tf32_cuts_off_most():
    """Factors of one sign just below a number of 11 bits: a round-off of 2⁻¹¹ is half of it."""
    x = torch.full((9, 64), 1 + 2.0**-10 - 2.0**-23)
    out = torch.full((9,), 64.0)  # each is 1 of 11 bits
    products = x.double() ** 2
    assert float(bound_ratio(out, *[products.sum(1)] * 2, 64, tf32=True).max()) > 0.99
    assert_within_bound(out, products.sum(1), products.sum(1), 64, tf32=True)


def test_a_result_that_is_stored_on_the_way_is_allowed_for():
    x, y = (torch.randn(9, 50, generator=torch.Generator().manual_seed(s)).half() for s in (0, 1))
    out = (x * y).float().sum(1).half()  # each product is rounded to half
    products = x.double() * y.double()
    rest = products.sum(1), products.abs().sum(1), 50
    assert float(bound_ratio(out, *rest).max()) > float(bound_ratio(out, *rest, stored=1).max())
    assert_within_bound(out, *rest, stored=1)


def test_shapes_must_agree():
    out, exact, magnitude, terms = problem(5, 3, torch.float32)
    with pytest.raises(AssertionError, match=r"out is \(2,\), exact is \(3,\)"):
        assert_within_bound(out[:2], exact, magnitude, terms)


def test_poisoned_memory_fills_and_then_stops():
    before = torch.utils.deterministic.fill_uninitialized_memory
    with poisoned_memory():
        assert torch.empty(100).isnan().all()
        assert torch.empty(100, dtype=torch.float16).new_empty(7).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before


def gelu(x):
    return x * (0.5 * (1 + torch.erf(x * 0.5**0.5)))


def gelu_problem(dtype, seed=0):
    """(result rounded once, exact, noise of plain PyTorch) of a formula that is no sum."""
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    exact = gelu(x.double())
    out = torch.nn.functional.gelu(x if dtype == torch.float64 else x.float()).to(dtype)
    beside = x.float() * (1 + torch.finfo(torch.float32).eps)
    return out, exact, plain_error(gelu(beside), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_the_noise_of_plain_torch_passes(dtype):
    for seed in range(20):
        assert 0 <= assert_as_accurate(*gelu_problem(dtype, seed)) <= 1


def first_row_doubled(out):
    out[0] *= 2
    return out


@pytest.mark.parametrize(
    "bug",
    [
        lambda out: out * 1.01,
        first_row_doubled,
        one_off_by_two_percent,
        one_is_nan,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_what_is_less_accurate_does_not(bug, dtype):
    out, exact, noise = gelu_problem(dtype)
    with pytest.raises(AssertionError, match=r"element \(\d+, \d\) of \(500, 3\) is .* plain Py"):
        assert_as_accurate(bug(out), exact, noise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_second_rounding_in_half_precision_does_not(dtype):
    out, exact, noise = gelu_problem(dtype)
    exact = out.double() * (1 + 0.75 * torch.finfo(dtype).eps)  # a rounding and half of another
    with pytest.raises(AssertionError, match="times those of plain PyTorch"):
        assert_as_accurate(out, exact, noise)


def test_one_element_that_no_mean_shows_does_not():
    out, exact, noise = gelu_problem(torch.float32)
    out[7, 1] = exact[7, 1] + 3 * noise.max() + torch.finfo(out.dtype).eps * exact[7, 1].abs()
    with pytest.raises(AssertionError, match=r"element \(7, 1\).*times those of plain PyTorch"):
        assert_as_accurate(out, exact, noise)


def test_another_formula_with_more_noise_everywhere_does_not():
    _, exact, noise = gelu_problem(torch.float32)
    out = (exact + 3 * noise.square().mean().sqrt()).float()  # below twice the largest error
    with pytest.raises(AssertionError, match="times those of plain PyTorch"):
        assert_as_accurate(out, exact, noise)


def test_no_noise_allows_one_rounding_and_no_more():
    exact = torch.tensor([1 / 3, 2.0], dtype=torch.float64)
    assert assert_as_accurate(exact.float(), exact, torch.zeros(1)) == 0
    with pytest.raises(AssertionError, match="inf times"):
        assert_as_accurate(exact.float() * (1 + 2**-22), exact, torch.zeros(1))


def double_problem(of_result, of_oracle, seed=0):
    """(result, oracle, noise) in float64 that err by multiples of what plain PyTorch errs there.

    All numbers are near 1 and of few bits, so errors are what they are told to be.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = 1 + torch.randint(2**20, (400,), generator=generator).double() / 2**21
    signs = 2 * torch.randint(2, (400,), generator=generator).double() - 1
    single, double = (torch.finfo(d).eps / 2 for d in (torch.float32, torch.float64))
    plain = (exact + 8 * single * signs).float()
    found = exact + 8 * double * of_result * signs, exact - 8 * double * of_oracle * signs
    return *found, plain_error(plain, exact, torch.float64)


def test_in_float64_the_oracle_errs_too():
    """1.5 = (2 + 1) / 2: twice the noise for the result, once for the oracle, on the other side."""
    for seed in range(20):
        assert_as_accurate(*double_problem(2, 1, seed))
    with pytest.raises(AssertionError, match=r"times those of plain PyTorch"):
        assert_as_accurate(*double_problem(3, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_plain_error_is_the_error_by_the_ratio_of_the_round_offs(dtype):
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain = torch.tensor([1 + 2**-20, 2.0])
    factor = 1.5 * 2.0**-29 if dtype == torch.float64 else 1.0
    assert plain_error(plain, exact, dtype).tolist() == [factor * 2.0**-20, 0]
