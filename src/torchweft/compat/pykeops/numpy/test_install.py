"""A check that reductions of NumPy's arrays work here."""

import sys

import numpy as np

from torchweft.errors import BackendError
from torchweft.reductions.numpy import Genred

__all__ = ["test_numpy_bindings"]


def test_numpy_bindings() -> None:
    """Compare a reduction of a few integers with its value.

    Raises:
        BackendError: it differs.
    """
    x, y = np.arange(1.0, 10).reshape(3, 3), np.arange(3.0, 9).reshape(2, 3)
    found = Genred("SqNorm2(x - y)", ["x = Vi(3)", "y = Vj(3)"])(x, y).flatten().tolist()
    if found != [63, 90]:
        raise BackendError(
            f"a reduction of NumPy's arrays is {found}: it must be [63, 90]. Run "
            "python -m torchweft doctor."
        )
    sys.stdout.write("pyKeOps with numpy bindings is working!\n")
