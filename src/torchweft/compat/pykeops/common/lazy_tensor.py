"""The classes that lazy tensors of torch and of NumPy share."""

from typing import Any

from torchweft.compat.lacking import lacking
from torchweft.reductions.lazy import ComplexLazyTensor as ComplexGenericLazyTensor
from torchweft.reductions.lazy import LazyTensor as GenericLazyTensor

__all__ = ["ComplexGenericLazyTensor", "GenericLazyTensor", "is_complex_lazytensor"]


def is_complex_lazytensor(x: Any) -> bool:
    """Whether it is a lazy tensor of complex numbers."""
    return isinstance(x, ComplexGenericLazyTensor)


__getattr__ = lacking(
    __name__,
    {
        "is_scalar_and_equals": "Compare the number itself.",
        "same_or_one_test": "Lazy tensors check dimensions themselves.",
    },
)
