"""The errors of torchweft: each says what was given, what is needed and what to do.

Every class is also the built-in that fits, so `except ValueError` catches a wrong shape.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CaptureError",
    "DTypeError",
    "DeviceError",
    "IndexRangeError",
    "RankError",
    "ShapeError",
    "WeftError",
]


class WeftError(Exception):
    """The base class of all errors that torchweft raises on purpose.

    Example:
        >>> import torch, torchweft
        >>> try:
        ...     torchweft.o3.spherical_harmonics(1, torch.ones(2), True)
        ... except torchweft.WeftError as error:
        ...     print(error)
        x is (2,): it must be (..., 3). Move the components last.
    """


class ShapeError(WeftError, ValueError):
    """A ValueError: a tensor, a table or a number that does not fit the others.

    Example:
        >>> import torchweft
        >>> try:
        ...     torchweft.o3.Irreps("1x")
        ... except ValueError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


class DTypeError(WeftError, TypeError):
    """A TypeError: a dtype, or a type of argument, that the call cannot take.

    Example:
        >>> import torchweft
        >>> try:
        ...     torchweft.constant(1.5)
        ... except TypeError as error:
        ...     print(type(error).__name__)
        DTypeError
    """


class DeviceError(WeftError, RuntimeError):
    """A RuntimeError: tensors on different devices, or on one that cannot serve.

    Example:
        >>> import torchweft
        >>> issubclass(torchweft.DeviceError, RuntimeError)
        True
    """


class IndexRangeError(WeftError, IndexError):
    """An IndexError: an index or a segment bound that points outside its table.

    Example:
        >>> import torch, torchweft
        >>> src = dst = torch.tensor([0, 5])
        >>> try:
        ...     torchweft.o3.Graph(src, dst, num_nodes=2)
        ... except IndexError as error:
        ...     print(type(error).__name__)
        IndexRangeError
    """


class BackendError(WeftError, RuntimeError):
    """A RuntimeError: a backend that was requested and cannot serve the call here.

    Example:
        >>> import torch, torchweft
        >>> x, algebra = torch.ones(4, 1), torchweft.clifford.Algebra((1, 1))
        >>> try:
        ...     torchweft.clifford.reverse(x, algebra, backend="triton")  # on the CPU
        ... except RuntimeError as error:
        ...     print(type(error).__name__)
        BackendError
    """


class CaptureError(WeftError, RuntimeError):
    """A RuntimeError: a function whose launches cannot be recorded, or whose record would be wrong.

    Example:
        >>> import torchweft
        >>> issubclass(torchweft.CaptureError, RuntimeError)
        True
    """


class RankError(WeftError, RuntimeError):
    """A RuntimeError: an error of another rank, without which this rank cannot go on.

    Example:
        >>> import torchweft
        >>> issubclass(torchweft.RankError, RuntimeError)
        True
    """
