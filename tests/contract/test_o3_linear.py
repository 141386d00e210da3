"""Linear: numbers by hand, features, errors; its contract is in test_o3_tensor_product.

Seen red with: the factor counted for each item alone, features left out of it, biases on 1o.
"""

import pytest
import torch

from weft import o3
from weft.errors import IndexRangeError, ShapeError
from weft.testing import assert_within_bound


def test_linear_by_hand():
    lin = o3.Linear("2x0e+1x1o+1x0e", "1x0e+1x1o", biases=True).double()
    with torch.no_grad():
        lin.weight.copy_(torch.tensor([1.0, 2, 3, 4]))
        lin.bias.fill_(0.5)
    found = lin(torch.tensor([[1.0, 10, 1, 2, 3, 100]]).double()).detach()
    # instructions (0, 0), (1, 1), (2, 0): three copies into the scalar, one into the vector
    exact = torch.tensor([[(1 + 20 + 400) / 3**0.5 + 0.5, 3, 6, 9]], dtype=torch.float64)
    assert_within_bound(found, exact, exact.abs(), 4)


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


def test_errors_of_linear():
    with pytest.raises(IndexRangeError, match=r"\(0, 2\) names item 2 of irreps_out, which has 1"):
        o3.Linear("2x0e", "2x0e", instructions=[(0, 2)])
    with pytest.raises(ShapeError, match=r"\(0, 0\) connects 2x0e with 2x1o"):
        o3.Linear("2x0e", "2x1o", instructions=[(0, 0)])
    with pytest.raises(ShapeError, match="biases asks for one of 2x1o: only 0e"):
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
