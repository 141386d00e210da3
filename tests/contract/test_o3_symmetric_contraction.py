"""SymmetricContraction against MACE's definition: dense tensors U, weights by element, Horner.

Seen red with: couplings in another order, a basis that is one function short, tables cast by
half(), elements gathered by row number, degrees read from the wrong weights; other couplings fitted
at the functions of another degree, or not looked at.
"""

import copy
import functools
import pickle

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.maces import contraction, dense
from torchweft import o3
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.o3.symmetric.program import symmetric_basis
from torchweft.testing import (
    assert_as_accurate,
    assert_o3_equivariant,
    assert_within_bound,
    plain_error,
)
from torchweft.testing.contract import Problem, assert_same_bits, evaluate

if INTERPRETED:
    pytest.skip("kernels have a contract of their own", allow_module_level=True)

DOUBLE = torch.float64
ELEMENTS = 3
LAYERS = {
    "cubic": ("3x0e+3x1o+3x2e", "3x0e+3x1o", 3),
    "every output": ("2x0e+2x1o", "2x0e+2x1o+2x1e+2x2e", 3),
    "other parity": ("2x0e+2x1e+2x1o", "2x0o+2x1e", 2),
    "linear": ("4x0e+4x1o", "4x1o+4x1e", 1),
    "quartic": ("1x0e+1x1o", "1x0e+1x1o", 4),
}


def layer(name, layout="mul_ir"):
    torch.manual_seed(0)
    irreps, out, correlation = LAYERS[name]
    return o3.SymmetricContraction(irreps, out, correlation, ELEMENTS, layout=layout)


def problem(name, layout="mul_ir", rows=6):
    module = layer(name, layout)
    generator = torch.Generator().manual_seed(0)
    randn = functools.partial(torch.randn, dtype=DOUBLE, generator=generator)
    weights = [randn(p.shape) for p in module.parameters()]
    x = randn(rows, module.irreps_in.dim)
    element = torch.randint(0, ELEMENTS, (rows,), generator=generator)
    tangents = tuple(randn(t.shape) for t in (x, *weights))
    tables = {"module": module, "element": element}
    return Problem((x, *weights), randn(rows, module.irreps_out.dim), tangents, tables)


def call(x, *weights, module, element):
    module = copy.deepcopy(module).to(x.dtype)
    names = [name for name, _ in module.named_parameters()]
    given = dict(zip(names, weights, strict=True))
    return torch.func.functional_call(module, given, (x, element))


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", LAYERS)
def test_is_maces(name, layout):
    """Value, gradients and second gradients by x and by every weight, in float32 and float64.

    In float64 the oracle rounds as much as the layer: errors are within the bound of a sum of its
    many terms, of which the largest element tells the size.
    """
    wide = problem(name, layout)
    narrow = wide.map(torch.Tensor.float)
    wanted = [0] + [i for i, p in enumerate(layer(name).parameters(), 1) if p.requires_grad]
    exact, found = evaluate(contraction, wide, wanted), evaluate(call, wide, wanted)
    irreps, _, correlation = LAYERS[name]
    terms = sum(ir.dim for _, ir in o3.Irreps(irreps)) ** correlation
    for key, value in found.items():
        size = exact[key].abs().max().clamp(min=1).expand_as(exact[key])  # inputs are of size 1
        assert_within_bound(value, exact[key], size, terms)
    exact = evaluate(contraction, narrow.map(torch.Tensor.double), wanted)
    plain, found = evaluate(contraction, narrow, wanted), evaluate(call, narrow, wanted)
    for key, value in found.items():
        noise = plain_error(plain[key], exact[key], torch.float32)
        assert_as_accurate(value, exact[key], noise + noise.max())


def test_few_functions_are_independent():
    """Of MACE's 74 cubic couplings 20, on top of 10 quadratic functions."""
    items = tuple(item.ir for item in o3.Irreps("0e+1o+2e+3o"))
    basis = symmetric_basis(items, (o3.Irrep("0e"), o3.Irrep("1o")), 3)
    shapes = [output.weights.shape for output in basis.outputs[2]]
    assert shapes == [(8, 23), (12, 51)]
    assert len(basis.levels[0]) == 10


def test_other_couplings_may_be_weighed():
    """U' = U A with weights w' is U with weights A w'."""
    given = problem("cubic")
    irreps = o3.Irreps([item.ir for item in o3.Irreps(LAYERS["cubic"][0])])
    module, other, tables = layer("cubic").double(), layer("cubic").double(), [[], [], []]
    for item, own, changed in zip(
        module.irreps_out, module.contractions, other.contractions, strict=True
    ):
        for degree in (1, 2, 3):
            table = dense(irreps, item.ir, degree)
            matrix = torch.randn(table.shape[-1], table.shape[-1] + 2, dtype=DOUBLE)
            weight = torch.nn.Parameter(torch.randn(ELEMENTS, len(matrix.T), 3, dtype=DOUBLE))
            tables[degree - 1].append((table @ matrix).float())
            if degree == 3:
                own.weights_max.data, changed.weights_max = matrix @ weight.data, weight
            else:
                own.weights[2 - degree].data = matrix @ weight.data
                changed.weights[2 - degree] = weight
    other.take_couplings(tables)
    x, element = given.inputs[0], given.tables["element"]
    exact = module(x, element).detach()
    # U' is rounded to float32: an error of a product of four such numbers, and of many sums
    size = exact.abs().max().expand_as(exact)
    assert_within_bound(other(x, element).detach().float(), exact, size, 27**3)


def test_couplings_that_turn_with_nothing():
    module = layer("linear")
    tables = [[torch.eye(4)[1:, :, None], torch.zeros(3, 4, 1)]]
    module.take_couplings(tables)
    with pytest.raises(ShapeError, match="are no equivariant polynomials in e3nn's basis"):
        module.take_couplings([[tables[0][0].flip(0), tables[0][1]]])
    with pytest.raises(ShapeError, match="are no equivariant polynomials in e3nn's basis"):
        module.take_couplings([[tables[0][0], tables[0][0]]])  # 1e of 1o


@pytest.mark.parametrize(
    ("irreps", "out", "degree"),
    [("0e+1o", "0e+1e", 2), ("0e+1o+2e", "0e+1e+1o", 2), ("0e+0o+1o+1e", "0o+1o", 3)],
)
def test_couplings_may_cancel(irreps, out, degree):
    """Couplings that change their sign when two factors are exchanged are 0: MACE has some.

    Seen red: magnitudes of the functions, not of their terms, as the size of rounding errors.
    """
    irreps, out = o3.Irreps(irreps), o3.Irreps(out)
    module = o3.SymmetricContraction(irreps, out, degree, 2)
    powers = range(1, degree + 1)
    tables = [[dense(irreps, item.ir, n).float() for item in out] for n in powers]
    exact = module.table.clone()
    module.take_couplings(tables)
    # couplings rounded to float32 are those of MACE that are meant, also with other signs
    assert module.table.tolist() == exact.tolist()
    module.take_couplings([[-table for table in of_degree] for of_degree in tables])
    assert module.table.tolist() == (-exact).tolist()


def test_elements_may_be_one_hot():
    module = layer("cubic").double()
    x = torch.randn(6, module.irreps_in.dim, dtype=DOUBLE)
    element = torch.tensor([0, 2, 1, 2, 0, 0])
    expected = module(x, element).detach()
    one_hot = torch.nn.functional.one_hot(element, ELEMENTS).double()
    noise = 2.0**-52 * expected.abs()
    assert_as_accurate(module(x, one_hot).detach(), expected, noise + noise.max())
    assert_same_bits(module(x, element.int()).detach(), expected, "int32")


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", ["cubic", "every output", "other parity"])
def test_equivariant(name, layout):
    module = layer(name, layout).double()
    x = torch.randn(6, module.irreps_in.dim, dtype=DOUBLE)
    element = torch.tensor([0, 2, 1, 2, 0, 0])
    assert_o3_equivariant(
        lambda x: module(x, element), [x], [module.irreps_in], module.irreps_out, layout=layout
    )


def test_names_and_shapes_are_maces():
    module = layer("cubic")
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    assert shapes == {
        "contractions.0.weights_max": (3, 11, 3),
        "contractions.0.weights.0": (3, 3, 3),
        "contractions.0.weights.1": (3, 1, 3),
        "contractions.1.weights_max": (3, 21, 3),
        "contractions.1.weights.0": (3, 4, 3),
        "contractions.1.weights.1": (3, 1, 3),
    }
    stored = module.state_dict() | {"contractions.0.U_matrix_3": torch.zeros(9, 9, 9, 11)}
    module.load_state_dict(stored)


def test_casts_round_no_table():
    module = layer("cubic")
    x = torch.randn(6, module.irreps_in.dim, dtype=DOUBLE)
    element = torch.tensor([0, 2, 1, 2, 0, 0])
    exact = copy.deepcopy(module).double()(x, element)
    cast = copy.deepcopy(module).half().double()
    cast.load_state_dict(module.state_dict())
    assert_same_bits(cast(x, element).detach(), exact.detach(), "after a cast")


def test_compiled_exported_copied():
    module = layer("cubic")
    x = torch.randn(6, module.irreps_in.dim)
    element = torch.tensor([0, 2, 1, 2, 0, 0])
    expected = module(x, element)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, element), expected, "compiled")
    program = torch.export.export(module, (x, element)).module()
    assert_same_bits(program(x, element), expected, "exported")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(other(x, element), expected, "copied")
    assert module(x[:0], element[:0]).shape == (0, 12)


def test_errors():
    module = layer("cubic")
    x, element = torch.randn(2, 27), torch.tensor([0, 1])
    with pytest.raises(ShapeError, match=r"all items must have one number of copies"):
        o3.SymmetricContraction("2x0e+3x1o", "2x0e", 2, 3)
    with pytest.raises(ShapeError, match="correlation is 0 and num_elements 3"):
        o3.SymmetricContraction("2x0e", "2x0e", 0, 3)
    with pytest.raises(ShapeError, match=r"x is \(2, 1, 27\): it must be \(N, 27\)"):
        module(x[:, None], element)
    with pytest.raises(ShapeError, match=r"element is \(1,\): it must be \(2,\) integers"):
        module(x, element[:1])
    with pytest.raises(ShapeError, match=r"element is \(2, 2\): .* or \(2, 3\) real numbers"):
        module(x, torch.ones(2, 2))
    for dtype in (torch.bool, torch.int16):  # the kernel that sorts elements takes neither
        with pytest.raises(DTypeError, match=rf"element is {dtype}: it must be int64 or int32, or"):
            module(x, element.to(dtype))
    with pytest.raises(DTypeError, match=r"element is a ndarray: it must be a torch\.Tensor"):
        module(x, element.numpy())
    with pytest.raises(IndexRangeError, match="3"):
        module(x, torch.tensor([0, 3]))
