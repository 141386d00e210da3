"""Linear: numbers by hand, features, elements, errors; its contract: test_o3_tensor_product.

Seen red with: the factor counted for each item alone, features left out of it, biases on 1o; rows
of elements by the matrices of the next one, gradients of one element's weights given to another;
every item with the bias of the first.
"""

import e3nn.o3
import pytest
import torch

from torchweft import o3
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.kernels


def test_linear_by_hand():
    lin = o3.Linear("2x0e+1x1o+1x0e", "1x0e+1x1o", biases=True).double()
    with torch.no_grad():
        lin.weight.copy_(torch.tensor([1.0, 2, 3, 4]))
        lin.bias.fill_(0.5)
    found = lin(torch.tensor([[1.0, 10, 1, 2, 3, 100]]).double()).detach()
    # instructions (0, 0), (1, 1), (2, 0): three copies into the scalar, one into the vector
    exact = torch.tensor([[(1 + 20 + 400) / 3**0.5 + 0.5, 3, 6, 9]], dtype=torch.float64)
    assert_within_bound(found, exact, exact.abs(), 4)


@pytest.mark.parametrize("features", [{}, {"f_in": 2, "f_out": 3}])
def test_biases_of_several_items(features):
    """All that zero is mapped to, in the order of the items."""
    lin = o3.Linear("1x0e", "2x0e+1x1o+1x0o+3x0e", biases=True, **features)
    with torch.no_grad():
        lin.bias.copy_(torch.arange(1.0, 1 + lin.bias.numel()).view(lin.bias.shape))
    found = lin(torch.zeros(2, *([2] if features else []), 1)).detach()
    bias = lin.bias.detach()
    exact = torch.cat([bias[..., :2], bias.new_zeros(*bias.shape[:-1], 4), bias[..., 2:]], -1)
    assert_within_bound(found, exact.expand_as(found), exact.abs().expand_as(found), 1)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_linear_with_features(layout):
    lin = o3.Linear("2x0e+1x1o", "1x0e+2x1o", f_in=3, f_out=4, layout=layout).double()
    assert tuple(lin.weight.shape) == (3, 4, 4)
    x = torch.randn(5, 3, 5).double()
    plain = o3.Linear("2x0e+1x1o", "1x0e+2x1o", internal_weights=False, layout=layout)
    exact = torch.stack(
        [sum(plain(x[:, i], lin.weight[i, o]) for i in range(3)) for o in range(4)], 1
    ).detach()
    exact = exact / 3**0.5
    assert_within_bound(lin(x).detach(), exact, exact.abs() + exact.abs().max(), 16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_matrices_by_element(layout, dtype):
    """As a product with a one-hot of the elements, in three orders."""
    lin = o3.Linear("5x0e+3x1o+2x0e", "4x1o+6x0e+1x2e", num_elements=4, layout=layout).to(dtype)
    assert tuple(lin.weight.shape) == (4, lin.weight_numel)
    element = torch.randint(3, (37,))  # the last has no rows
    x, g = torch.randn(37, lin.irreps_in.dim), torch.randn(37, lin.irreps_out.dim)
    found = orders(lambda x, w: lin(x, w, element=element), x.to(dtype), lin.weight, g.to(dtype))
    product = o3.FullyConnectedTensorProduct(
        lin.irreps_in, "4x0e", lin.irreps_out, in2_var=[1 / 4], internal_weights=False,
        layout=layout,
    ).double()  # fmt: skip
    met = {(i.i_in, i.i_out): n for n, i in enumerate(lin.instructions)}
    one_hot = torch.nn.functional.one_hot(element, 4).double()

    def exact(x, w):
        views = list(lin.weight_views(w))
        parts = [views[met[i.i_in1, i.i_out]] for i in product.instructions]
        return product(x, one_hot, torch.cat([part.transpose(0, 1).flatten() for part in parts]))

    wide = orders(exact, x.double(), lin.weight.double(), g.double())
    for some, value in zip(found, wide, strict=True):
        assert_within_bound(some, value, value.abs() + value.abs().max(), 256)


def orders(function, x, w, g):
    """The value, its gradients, and the gradients of the square of one."""
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))
    z = function(x, w)
    of_x, of_w = torch.autograd.grad(z, (x, w), g, create_graph=True)
    return [z.detach(), of_x.detach(), of_w.detach(), *torch.autograd.grad(of_x.square().sum(), w)]


def test_errors_of_linear_by_element():
    lin = o3.Linear("2x0e", "2x0e", num_elements=3)
    x, element = torch.randn(4, 2), torch.tensor([0, 2, 1, 2])
    with pytest.raises(ShapeError, match="element is missing but num_elements is 3"):
        lin(x)
    with pytest.raises(ShapeError, match="element is given but num_elements is None"):
        o3.Linear("2x0e", "2x0e")(x, element=element)
    with pytest.raises(DTypeError, match=r"element is torch.float32: it must be int64 or int32"):
        lin(x, element=element.float())
    with pytest.raises(
        ShapeError, match=r"x is \(4, 2\) and element \(3,\): they must be \(N, 2\)"
    ):
        lin(x, element=element[1:])
    with pytest.raises(IndexRangeError, match=r"element\[1\] is 3 but there are weights of 3"):
        lin(x, element=torch.tensor([0, 3, 1, 2]))
    with pytest.raises(ShapeError, match=r"weight is \(4,\).*takes \(3, 4\)"):
        lin(x, torch.randn(4), element=element)
    for more in ({"f_in": 2, "f_out": 2}, {"shared_weights": False}, {"biases": True}):
        with pytest.raises(ShapeError, match=r"1 or more elements have shared weights"):
            o3.Linear("2x0e", "2x0e", num_elements=3, **more)


def test_rows_without_numbers_where_no_path_reads_them():
    """MACE's dipole readouts give (N, 0) to a Linear from 16x0e to 1x1o; e3nn's is zero.

    Red before: a ShapeError, for (6, 16) was wanted.
    """
    none, kept = torch.randn(6, 0), torch.randn(6, 16)
    for out, biases in (("1x1o", False), ("1x1o+2x0e", True)):
        layer = o3.Linear("16x0e", out, instructions=[], biases=biases)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        assert_same_bits(layer(none), layer(kept), out)
    theirs = e3nn.o3.Linear("16x0e", "1x1o")
    assert_same_bits(o3.Linear("16x0e", "1x1o")(none), theirs(none), "e3nn's")
    with pytest.raises(ShapeError, match=r"x is \(6, 0\) but Linear takes 16x0e"):
        o3.Linear("16x0e", "1x0e")(none)
    with pytest.raises(ShapeError, match=r"x is \(6, 7\) but Linear takes 16x0e"):
        o3.Linear("16x0e", "1x1o")(torch.randn(6, 7))


def test_errors_of_linear():
    with pytest.raises(IndexRangeError, match=r"\(0, 2\) names item 2 of irreps_out, which has 1"):
        o3.Linear("2x0e", "2x0e", instructions=[(0, 2)])
    with pytest.raises(ShapeError, match=r"\(0, 0\) connects 2x0e with 2x1o"):
        o3.Linear("2x0e", "2x1o", instructions=[(0, 0)])
    with pytest.raises(ShapeError, match="biases has True for 2x1o: only 0e"):
        o3.Linear("2x1o", "2x1o", biases=[True])
    with pytest.raises(ShapeError, match="biases has 2 flags but irreps_out 2x0e has 1"):
        o3.Linear("2x0e", "2x0e", biases=[True, False])
    with pytest.raises(ShapeError, match="f_in is 3 and f_out is None"):
        o3.Linear("2x0e", "2x0e", f_in=3)
    with pytest.raises(ShapeError, match=r"x is \(4, 2\) but f_in is 3: it must be \(…, 3, 2\)"):
        o3.Linear("2x0e", "2x0e", f_in=3, f_out=2)(torch.randn(4, 2))
    biased = o3.Linear("2x0e", "2x0e", biases=True, internal_weights=False)
    with pytest.raises(ShapeError, match=r"bias is missing: this Linear takes \(…, 2\)"):
        biased(torch.randn(4, 2), torch.randn(4))
    with pytest.raises(ShapeError, match=r"bias is \(3,\): this Linear takes \(…, 2\)"):
        biased(torch.randn(4, 2), torch.randn(4), torch.randn(3))
