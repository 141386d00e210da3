"""Tensor products and linear maps: every mode, both layouts, derivatives, doors, classes, errors.

The cases are in tests.cases.instructed.

Seen red with: weights of one instruction moved on by one, a mix without its factor, copies of y and
of x exchanged in uvuv, blocks of an output overwritten, views that start too late; of few rows: a
scalar without its factor, tables and mixed copies turned over, copies of one factor alone summed
twice, a table made in inference mode that autograd refused, products in bfloat16.
"""

import copy
import pickle

import pytest
import torch

from tests.cases.instructed import linear_case, suite
from tests.conftest import INTERPRETED
from tests.covering import FULL
from torchweft import o3
from torchweft.core.explain import explain
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import join, split
from torchweft.o3.tensor_product import evaluation
from torchweft.testing import assert_o3_equivariant, assert_within_bound
from torchweft.testing.contract import BODY_CHECKS, Setting, assert_same_bits, check_values
from torchweft.testing.doors import DOOR_CHECKS, check_numerical, check_opcheck

if INTERPRETED:
    pytest.skip("kernels have a contract of their own", allow_module_level=True)

SUITE = suite()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def named(case):
    return case.name


@pytest.fixture
def operators(monkeypatch):
    """No rows are so few that they are computed without."""
    monkeypatch.setattr(evaluation.ProductRecipe, "by_torch", lambda *_: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SUITE.cases, ids=named)
@pytest.mark.singly  # each item compiles for seconds
def test_values_by_operators(case, dtype, operators):
    test_values(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SUITE.cases, ids=named)
def test_values(case, dtype):
    """Second order in float32; with many edges, by loops, it is the contract of the operator."""
    looped = "hub" in case.name and not FULL
    check_values(
        case, Setting(dtype=dtype, order=2 if dtype == torch.float32 and not looped else 1)
    )


@pytest.mark.parametrize("check", BODY_CHECKS[1:], ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", SUITE.full, ids=named)
def test_promises(case, check):
    check(case, Setting())


@pytest.mark.parametrize("check", DOOR_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.singly  # cases share their operator
def test_doors(case, check):
    check(case)


@pytest.mark.parametrize("check", [c for c in DOOR_CHECKS if c is not check_opcheck])
def test_doors_of_linear(check):
    """It has no operator of its own."""
    check(linear_case(True, "mul_ir", rows=2))


@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical(case):
    check_numerical(case)


COUPLED = ("1x0e", "1x1o", "4x0e+2x1o", "1x0e+2x1o")


@pytest.mark.parametrize("in1", COUPLED)
@pytest.mark.parametrize("in2", COUPLED)
@pytest.mark.parametrize("shared", [True, False])
def test_few_rows_are_those_of_the_operators(in1, in2, shared, monkeypatch):
    """Values, gradients and their gradients; with one copy of either factor, or several."""
    torch.manual_seed(0)
    tp = o3.FullyConnectedTensorProduct(
        in1, in2, "2x0e+1x1o+3x1e+2x2e", shared_weights=shared, internal_weights=False
    )
    lead = () if shared else (3,)
    shapes = (3, tp.irreps_in1.dim), (3, tp.irreps_in2.dim), (*lead, tp.weight_numel)
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    cotangent = torch.randn(3, tp.irreps_out.dim, dtype=torch.float64)

    def results():
        z = tp(*leaves)
        first = torch.autograd.grad(z, leaves, cotangent, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        return [z, *first, *second]

    few = results()
    monkeypatch.setattr(evaluation.ProductRecipe, "by_torch", lambda *_: False)
    for found, expected in zip(few, results(), strict=True):
        assert_within_bound(found, expected, expected.abs() + expected.abs().max(), 64)


def kernels(module, *inputs):
    return {launch.kernel for launch in explain(module, *inputs).launches}


def test_who_computes_rows():
    alone = {"by_instruction"}
    tp = o3.TensorProduct("8x1o", "1o", "8x2e", [(0, 0, 0, "uvu", True)])
    x, y = torch.randn(5, 24), torch.randn(5, 3)
    assert kernels(tp, x, y) == {"few_z"}
    tp = o3.FullyConnectedTensorProduct("8x1o", "1o", "8x2e")
    assert kernels(tp, x, y) == alone
    assert kernels(tp, *(torch.randn(1024, n) for n in (24, 3))) == alone
    both = [(0, 0, 0, "uvu", True), (0, 0, 0, "uvw", True)]
    both = o3.TensorProduct("8x1o", "1o", "8x2e", both)
    assert kernels(both, x, y) == alone
    assert kernels(both, *(torch.randn(1024, n) for n in (24, 3))).isdisjoint(alone)
    assert kernels(tp.half(), x.half(), y.half()).isdisjoint(alone)
    tp.float().recipe = tp.recipe._replace(backend="torch")
    assert kernels(tp, x, y).isdisjoint(alone)
    scalars = o3.TensorProduct("8x0e", "0e", "8x0e", [(0, 0, 0, "uvu", True)])
    assert kernels(scalars, torch.randn(9999, 8), torch.randn(9999, 1)) == {"few_z"}
    mixed = o3.FullyConnectedTensorProduct("4x1o", "4x1o", "4x1e")
    assert kernels(mixed, torch.randn(9999, 12), torch.randn(9999, 12)) == alone


def test_few_rows_are_not_rounded():
    """Where torch may round the factors of products, operators do not."""
    tp = o3.FullyConnectedTensorProduct("8x1o", "1o", "8x2e")
    inputs = torch.randn(5, 24), torch.randn(5, 3)
    torch.set_float32_matmul_precision("medium")
    try:
        assert "by_instruction" not in kernels(tp, *inputs)
        assert "by_instruction" in kernels(tp.double(), *(a.double() for a in inputs))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tables_of_inference_serve_training():
    """No others have this factor, so that the table is made here."""
    tp = o3.TensorProduct("1o", "1o", "2e", [(0, 0, 0, "uuu", False, 0.123)])
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in "xy")
    with torch.inference_mode():
        tp(x, y)
    tp(x, y).sum().backward()
    assert x.grad.any()


def test_what_is_not_finite_stays_in_its_paths():
    tp = o3.TensorProduct(
        "1o+1o", "1o+1o", "2e+2e", [(0, 0, 0, "uuu", False), (1, 1, 1, "uuu", False)]
    )
    x, y = torch.randn(2, 6), torch.randn(2, 6)
    x[0, 0] = float("inf")
    finite = tp(x, y).isfinite()
    assert not finite[0, :5].all()
    assert finite[0, 5:].all()
    assert finite[1].all()


NATURAL = o3.Irreps.spherical_harmonics(6)
TURNED = {
    "uvu to degree 6": lambda layout: o3.TensorProduct(
        NATURAL,
        NATURAL,
        NATURAL,
        [
            (i, j, k, "uvu", True)
            for i in range(7)
            for j in range(7)
            for k in range(7)
            if abs(i - j) <= k <= i + j and (i + j + k) % 2 == 0
        ],
        layout=layout,
    ),
    "fully connected": lambda layout: o3.FullyConnectedTensorProduct(
        "2x0e+2x1o+1x2o+1x6e", "1x0o+2x1e+1x3o", "2x0e+3x0o+2x1o+1x5e", layout=layout
    ),
    "elementwise": lambda layout: o3.ElementwiseTensorProduct("3x1o+2x2e", "5x1e", layout=layout),
    "full": lambda layout: o3.FullTensorProduct("2x1o+1x4e", "2x1e+0o", layout=layout),
    "square": lambda layout: o3.TensorSquare("3x0e+2x1o+1x2e", layout=layout),
    "mixed square": lambda layout: o3.TensorSquare("3x0e+2x1o", "2x0e+1x1o+2x2e", layout=layout),
    "linear": lambda layout: o3.Linear("2x0e+3x6o+1x6o+2x1e", "3x0e+2x6o", layout=layout),
}
"""Modules under rotations and inversion."""


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", TURNED)
def test_equivariant(name, layout):
    torch.manual_seed(0)
    module = TURNED[name](layout).double()
    if isinstance(module, o3.Linear | o3.TensorSquare):
        irreps = [module.irreps_in]
    else:
        irreps = [module.irreps_in1, module.irreps_in2]
    inputs = [torch.randn(5, i.dim, dtype=torch.float64) for i in irreps]
    assert_o3_equivariant(module, inputs, irreps, module.irreps_out, layout=layout)


@pytest.mark.parametrize("name", TURNED)
def test_layouts_hold_the_same_numbers(name):
    torch.manual_seed(0)
    module, turned = TURNED[name]("mul_ir").double(), TURNED[name]("ir_mul").double()
    turned.load_state_dict(module.state_dict())
    one = isinstance(module, o3.Linear | o3.TensorSquare)
    irreps = [module.irreps_in] if one else [module.irreps_in1, module.irreps_in2]
    inputs = [torch.randn(2, 3, i.dim, dtype=torch.float64) for i in irreps]
    expected = module(*inputs).detach()
    found = turned(*(relaid(x, i, "mul_ir", "ir_mul") for x, i in zip(inputs, irreps, strict=True)))
    found = relaid(found.detach(), module.irreps_out, "ir_mul", "mul_ir")
    assert_within_bound(found, expected, expected.abs() + expected.abs().max(), 64)


def relaid(x, irreps, old, new):
    return join(split(x, o3.Irreps(irreps), old), new)


def test_attributes_are_e3nns():
    tp = o3.TensorProduct(
        "2x0e+3x1o",
        "2x0e",
        "2x0e+1x2e+3x1o",
        [(0, 0, 0, "uvu", True), (1, 0, 2, "uvu", False), (0, 0, 0, "uuu", True)],
    )
    assert (tp.weight_numel, tp.internal_weights, tp.shared_weights) == (6, True, True)
    assert [i.path_shape for i in tp.instructions] == [(2, 2), (3, 2), (2,)]
    assert tp.output_mask.tolist() == [1] * 2 + [0] * 5 + [1] * 9
    assert [tuple(view.shape) for view in tp.weight_views()] == [(2, 2), (2,)]
    assert [n for n, _, _ in tp.weight_views(yield_instruction=True)] == [0, 2]
    assert_same_bits(tp.weight_view_for_instruction(2).detach(), tp.weight[4:].detach(), "view")
    assert repr(tp) == "TensorProduct(2x0e+3x1o x 2x0e -> 2x0e+1x2e+3x1o | 12 paths | 6 weights)"
    assert list(tp.state_dict()) == ["weight"]


def test_weights_as_a_list():
    tp = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o")
    x, y = torch.randn(4, 5), torch.randn(4, 4)
    assert_same_bits(tp(x, y, list(tp.weight_views())), tp(x, y), "as a list")
    own = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o", shared_weights=False)
    weight = torch.randn(4, own.weight_numel)
    assert_same_bits(own(x, y, list(own.weight_views(weight))), own(x, y, weight), "own, as a list")


def test_leading_dimensions_broadcast():
    tp = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o", shared_weights=False)
    x, y, w = torch.randn(4, 1, 5), torch.randn(3, 4), torch.randn(1, 1, tp.weight_numel)
    found = tp(x, y, w)
    assert found.shape == (4, 3, 6)
    assert_same_bits(found[2, 1:2], tp(x[2], y[1:2], w[0]), "one row")


def test_right_is_the_matrix_of_x():
    tp = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o").double()
    x, y = torch.randn(4, 5).double(), torch.randn(4, 4).double()
    exact = tp(x, y).detach()
    found = torch.einsum("zi,zio->zo", x, tp.right(y)).detach()
    assert_within_bound(found, exact, exact.abs() + exact.abs().max(), 64)


@pytest.mark.parametrize("name", ["uvu to degree 6", "mixed square", "linear"])
def test_casts_round_no_table(name):
    """Through float16 and back, and under another default dtype: float64 to the last bit."""
    torch.manual_seed(0)
    module = TURNED[name]("mul_ir")
    count = 1 if isinstance(module, o3.Linear | o3.TensorSquare) else 2
    irreps = [module.irreps_in1] * count if count == 2 else [module.irreps_in]
    inputs = [torch.randn(3, i.dim, dtype=torch.float64) for i in irreps]
    exact = copy.deepcopy(module).double()(*inputs)
    state = module.state_dict()
    torch.set_default_dtype(torch.float16)
    try:
        other = TURNED[name]("mul_ir")
    finally:
        torch.set_default_dtype(torch.float32)
    for cast in (copy.deepcopy(module).half().double(), other.double()):
        cast.load_state_dict(state)
        assert_same_bits(cast(*inputs).detach(), exact.detach(), "after a cast")


@pytest.mark.parametrize("name", TURNED)
def test_copies_and_pickles(name):
    module = TURNED[name]("mul_ir")
    one = isinstance(module, o3.Linear | o3.TensorSquare)
    irreps = [module.irreps_in] if one else [module.irreps_in1, module.irreps_in2]
    inputs = [torch.randn(2, i.dim) for i in irreps]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(other(*inputs), module(*inputs), "copied")


def test_checkpoints_of_e3nn_load():
    """Its tables and empty weights are dropped; what is unknown is still refused."""
    tp = o3.TensorProduct("2x0e", "0e", "2x0e", [(0, 0, 0, "uvu", False)])
    stored = {"weight": torch.zeros(0), "output_mask": torch.ones(2)}
    tp.load_state_dict(dict(stored))
    lin = o3.Linear("2x0e", "2x0e")
    lin.load_state_dict({**stored, "weight": torch.ones(4), "bias": torch.zeros(0)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        tp.load_state_dict({"scale": torch.ones(1)})


def test_zero_copies_and_no_output():
    tp = o3.TensorProduct("0x0e+2x1o", "0e", "0x0e+2x1o", [(0, 0, 0, "uvu", True)])
    assert tp(torch.randn(3, 6), torch.randn(3, 1)).abs().sum() == 0
    assert o3.Linear("2x0e", "")(torch.randn(3, 2)).shape == (3, 0)
    assert o3.Linear("", "2x0e")(torch.randn(3, 0)).tolist() == [[0, 0]] * 3


def test_errors_of_products():
    tp = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o")
    x, y = torch.randn(4, 5), torch.randn(4, 4)
    with pytest.raises(
        ShapeError, match=r"x is \(4, 4\) but .* takes 2x0e\+1x1o: it must be \(…, 5\)"
    ):
        tp(y, y)
    with pytest.raises(DTypeError, match=r"y is a list: it must be a torch\.Tensor"):
        tp(x, [1.0])
    with pytest.raises(
        ShapeError, match=r"weight is \(3,\): .* shared_weights=True takes \(\d+,\)"
    ):
        tp(x, y, torch.randn(3))
    with pytest.raises(ShapeError, match="leading dimensions of the inputs are"):
        tp(x, y[:3])
    with pytest.raises(DTypeError, match=r"y is torch\.float64 but x is torch\.float32"):
        tp(x, y.double())
    with pytest.raises(ShapeError, match="internal_weights is True but shared_weights is False"):
        o3.FullyConnectedTensorProduct(
            "0e", "0e", "0e", internal_weights=True, shared_weights=False
        )
    own = o3.FullyConnectedTensorProduct("2x0e+1o", "0e+1o", "3x0e+1o", shared_weights=False)
    with pytest.raises(ShapeError, match=r"weight is missing: .* takes \(…, \d+\)"):
        own(x, y)
    with pytest.raises(DTypeError, match="or a list of 4, one for each instruction"):
        tp(x, y, [torch.randn(2)])
    with pytest.raises(ShapeError, match="layout is 'mul': it must be 'mul_ir'"):
        o3.Linear("0e", "0e", layout="mul")
    with pytest.raises(ShapeError, match="instruction 1 has no weight"):
        o3.TensorProduct(
            "2x0e", "2x0e", "2x0e", [(0, 0, 0, "uuu", True), (0, 0, 0, "uuu", False)]
        ).weight_view_for_instruction(1)
    with pytest.raises(ShapeError, match="irreps_in1 2x0e has 2 irreps and irreps_in2 3x0e has 3"):
        o3.ElementwiseTensorProduct("2x0e", "3x0e")
    with pytest.raises(ShapeError, match="irreps_out and filter_ir_out are both given"):
        o3.TensorSquare("2x0e", "2x0e", filter_ir_out=["0e"])
    with pytest.raises(ShapeError, match="irrep_normalization is 'all'"):
        o3.TensorSquare("2x0e", irrep_normalization="all")
