"""Products mixed by weights of each row's own, by one operator: kernels against float64.

In the interpreter; derivatives of both orders, doors.  The oracle is torch's own operations,
instruction by instruction.  Seen red with: the second pair of a sum left out, a tile's rows behind
the last copy kept, a factor of x in place of y's in the gradient of y, numbers without a path not
written.
"""

import pytest
import torch

from tests.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from torchweft import explain, o3
from torchweft.o3.mixing import operator as mixing_operator
from torchweft.o3.mixing.rows_source import MIXED_PRODUCT
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error
from torchweft.testing.contract import assert_same_bits

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

LAYOUTS = ["mul_ir", "ir_mul"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

PRODUCTS = {
    # several paths into a block, tiles that are not full, an irrep of each without a path
    "ragged": ("5x0e+3x1o+2x1e+2x3o", "0e+1o+5o", "18x1o+3x0e+2x1e+1x7o"),
    "several tiles": ("33x0e+17x1o", "0e+1o", "50x1o+2x0e"),
    "degrees": ("3x1o+2x2e", "0e+1o+2e", "4x1e+2x3o+3x2e"),
}


def module(name, layout="mul_ir", **options):
    return o3.FullyConnectedTensorProduct(
        *PRODUCTS[name], shared_weights=False, internal_weights=False, layout=layout, **options
    )


def data(of, rows, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    widths = (of.irreps_in1.dim, of.irreps_in2.dim, of.weight_numel)
    return [torch.randn(rows, width, generator=made).to(dtype) for width in widths]


def both_orders(of, inputs):
    """z, first gradients g of Σ c z², and gradients of Σ c g.

    The c are exact: those that follow from g would add its rounding to what is checked.
    """
    x, y, w = (v.clone().requires_grad_() for v in inputs)
    z = of(x, y, w)
    first = torch.autograd.grad((z * z * ramp(z)).sum(), (x, y, w), create_graph=True)
    second = torch.autograd.grad(sum((g * ramp(g)).sum() for g in first), (x, y, w))
    return [z, *first, *second]


def ramp(like):
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype).view_as(like)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.singly  # seconds an item in the interpreter
def test_values_and_both_orders(name, layout, rows):
    of, oracle = module(name, layout), module(name, layout, backend="torch")
    draws = [data(of, rows, seed=seed) for seed in range(4)]
    exact = [both_orders(oracle, [v.double() for v in inputs]) for inputs in draws]
    plain = [both_orders(oracle, inputs) for inputs in draws]
    for n, found in enumerate(both_orders(of, draws[0])):  # torch's own noise, of several draws
        noise = [plain_error(p[n], e[n], found.dtype) for p, e in zip(plain, exact, strict=True)]
        assert_as_accurate(found, exact[0][n], torch.stack(noise))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    of, oracle = module("ragged"), module("ragged", backend="torch")
    inputs = data(of, 4, dtype)
    z = of(*inputs)
    assert z.dtype == dtype
    value = oracle(*(v.double() for v in inputs))
    assert_within_bound(z, value, value.abs() + value.abs().max(), of.weight_numel)
    assert_same_bits(z, of(*inputs), "again")


def test_one_kernel_forward_and_two_backward():
    of = module("ragged")
    x, y, w = (v.requires_grad_() for v in data(of, 3))

    def names(function):
        return [launch.kernel for launch in explain(function).launches]

    z = of(x, y, w)
    assert names(lambda: of(x, y, w)) == [MIXED_PRODUCT]
    assert names(lambda: z.sum().backward()) == [MIXED_PRODUCT] * 2


def test_no_rows():
    of = module("ragged")
    assert of(*data(of, 0)).shape == (0, of.irreps_out.dim)


def test_what_kernels_do_not_hold_goes_by_rows_of_t():
    """Copies of y that are written out, and weights that are too many to copy ahead."""
    for irreps in (("3x0e+2x1o", "2x0e+1o", "3x1o"), ("200x0e", "0e", "90x0e")):
        of = o3.FullyConnectedTensorProduct(*irreps, shared_weights=False, internal_weights=False)
        oracle = o3.FullyConnectedTensorProduct(
            *irreps, shared_weights=False, internal_weights=False, backend="torch"
        )
        mixed = of.recipe.parts.mixed
        inputs = data(of, 2)
        assert not mixing_operator.serves_mixed_rows(mixed.mixing, mixed.structure, inputs[0], None)
        value = oracle(*(v.double() for v in inputs))
        size = value.abs() + value.abs().max()
        assert_within_bound(of(*inputs), value, size, of.weight_numel)


def test_doors():
    of = module("ragged")
    inputs = data(of, 4)
    z = of(*inputs)
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*inputs), z, "compiled")
    both = [torch.stack([v, 2 * v]) for v in inputs]
    each = torch.func.vmap(of)(*both)
    assert_same_bits(each, torch.stack([z, 8 * z]), "mapped")
    each = torch.func.vmap(of, in_dims=(None, 0, None))(inputs[0], both[1], inputs[2])
    assert_same_bits(each, torch.stack([z, 2 * z]), "mapped y")
    _, moved = torch.func.jvp(of, tuple(inputs), tuple(inputs))
    assert_within_bound(moved, 3 * z.double(), z.abs().double() + z.abs().max(), of.weight_numel)
    mixed = of.recipe.parts.mixed
    rest = (mixed.structure.text, "xyw|z:0,1,2", mixed.mixing.text)
    args = [v.clone().requires_grad_() for v in inputs]
    torch.library.opcheck(torch.ops.torchweft.o3_mixed_rows.default, (args, *rest))
