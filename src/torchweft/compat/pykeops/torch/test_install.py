"""A check that reductions of torch's tensors work here."""

import sys

import torch

from torchweft.errors import BackendError
from torchweft.reductions import Genred

__all__ = ["test_torch_bindings"]


def test_torch_bindings() -> None:
    """Compare a reduction of a few integers with its value.

    Raises:
        BackendError: it differs.
    """
    x, y = torch.arange(1.0, 10).view(3, 3), torch.arange(3.0, 9).view(2, 3)
    found = Genred("SqNorm2(x - y)", ["x = Vi(3)", "y = Vj(3)"])(x, y).flatten().tolist()
    if found != [63, 90]:
        raise BackendError(
            f"a reduction of torch's tensors is {found}: it must be [63, 90]. Run "
            "python -m torchweft doctor."
        )
    sys.stdout.write("pyKeOps with torch bindings is working!\n")
