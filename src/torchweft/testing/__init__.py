"""Tools that test kernels and layers: error bounds, op contracts, equivariance, poisoned memory.

`torchweft.testing.interpreter`, `.sanitizer` and `.compiler` need triton: import them by name.
"""

from torchweft.testing.bounds import (
    accuracy_ratio,
    assert_as_accurate,
    assert_within_bound,
    bound_ratio,
    error_bound,
    plain_error,
)
from torchweft.testing.contract import Case, assert_contract, poisoned_memory
from torchweft.testing.doors import assert_doors
from torchweft.testing.equivariance import (
    assert_equivariant,
    assert_o3_equivariant,
    random_versor,
)

__all__ = [
    "Case",
    "accuracy_ratio",
    "assert_as_accurate",
    "assert_contract",
    "assert_doors",
    "assert_equivariant",
    "assert_o3_equivariant",
    "assert_within_bound",
    "bound_ratio",
    "error_bound",
    "plain_error",
    "poisoned_memory",
    "random_versor",
]
