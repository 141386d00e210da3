"""Tools that test kernels: error bounds, op contracts, poisoned memory, interpreter, compiler.

`weft.testing.interpreter`, `.sanitizer` and `.compiler` need triton, `.strategies` needs
hypothesis; they are imported by themselves.
"""

from weft.testing.bounds import assert_within_bound, bound_ratio, error_bound
from weft.testing.contract import Case, assert_contract
from weft.testing.doors import assert_doors
from weft.testing.memory import poisoned_memory

__all__ = [
    "Case",
    "assert_contract",
    "assert_doors",
    "assert_within_bound",
    "bound_ratio",
    "error_bound",
    "poisoned_memory",
]
