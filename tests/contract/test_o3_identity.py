"""Identity: x itself, and its irreps.

Seen red with: irreps that are not compared.
"""

import pytest
import torch

from torchweft import o3
from torchweft.errors import ShapeError


def test_identity():
    layer = o3.Identity("1x0e+1x0e+1x1o", "2x0e+1o")
    x = torch.randn(4, 5)
    assert layer(x) is x
    assert repr(layer) == "Identity(2x0e+1x1o -> 2x0e+1x1o)"
    layer.load_state_dict({"output_mask": torch.ones(5)})  # as e3nn stores it
    assert not layer.state_dict()


def test_errors():
    with pytest.raises(
        ShapeError, match="irreps_in is 1x0e and irreps_out 1x0o: they must be the same"
    ):
        o3.Identity("0e", "0o")
    with pytest.raises(ShapeError, match=r"x is \(4, 2\) but Identity takes 1x0e"):
        o3.Identity("0e", "0e")(torch.randn(4, 2))
