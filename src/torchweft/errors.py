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
    """Base of every error torchweft raises on purpose."""


class ShapeError(WeftError, ValueError):
    """A tensor, a table or a size that does not fit the others."""


class DTypeError(WeftError, TypeError):
    """A dtype or a type of argument that the call cannot take."""


class DeviceError(WeftError, RuntimeError):
    """Tensors on different devices, or on one that cannot serve."""


class IndexRangeError(WeftError, IndexError):
    """An index or a segment bound that points outside what it indexes."""


class BackendError(WeftError, RuntimeError):
    """A backend that was asked for and cannot serve the call here."""


class CaptureError(WeftError, RuntimeError):
    """A function whose launches cannot be recorded, or whose record would give other results."""


class RankError(WeftError, RuntimeError):
    """What another rank raised: this one cannot go on without it."""
