"""What may follow a convolution: act(y · scale + shift + residual), in the pass that writes y."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from torchweft.errors import ShapeError

__all__ = ["ACTIVATIONS", "NO_EPILOGUE", "Epilogue", "check"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": silu,
    "gelu": gelu,
}
"""By name; gelu is the exact one, x Φ(x)."""


class Epilogue(NamedTuple):
    """act(y · scale + shift + residual); None omits a step.

    Args:
        scale: (C_out,).
        shift: (C_out,).
        residual: (N_out, C_out).
        activation: a name of ACTIVATIONS.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None

    def with_bias(self, bias: Tensor | None) -> Epilogue:
        """The epilogue of y + bias: the bias becomes a part of the shift, in float32."""
        if bias is None:
            return self
        shift = bias.to(torch.promote_types(bias.dtype, torch.float32))
        shift = shift if self.scale is None else shift * self.scale
        return self._replace(shift=shift if self.shift is None else shift + self.shift)

    def to(self, dtype: torch.dtype) -> Epilogue:
        """The same in another dtype."""
        scale, shift, residual = [None if t is None else t.to(dtype) for t in self[:3]]
        return Epilogue(scale, shift, residual, self.activation)

    def __call__(self, y: Tensor) -> Tensor:
        """Apply the steps to a result one after the other."""
        y = y if self.scale is None else y * self.scale
        y = y if self.shift is None else y + self.shift
        y = y if self.residual is None else y + self.residual
        return y if self.activation is None else ACTIVATIONS[self.activation](y)


NO_EPILOGUE = Epilogue()


def check(given: Epilogue, rows: int, channels: int) -> None:
    """Raise unless an epilogue fits an output of (rows, channels).

    Raises:
        ShapeError: a shape that does not fit, an unknown activation.
    """
    shapes = {"scale": (channels,), "shift": (channels,), "residual": (rows, channels)}
    for name, needed in shapes.items():
        tensor = getattr(given, name)
        if tensor is not None and tuple(tensor.shape) != needed:
            raise ShapeError(
                f"{name} is {tuple(tensor.shape)} but the output is ({rows}, {channels}): {name} "
                f"must be {needed}. Pass one number a channel, or for residual the features of a "
                "tensor on the output's voxels."
            )
    if given.activation is not None and given.activation not in ACTIVATIONS:
        raise ShapeError(
            f"activation is {given.activation!r}: it must be one of {', '.join(ACTIVATIONS)}. "
            "Apply any other to the result."
        )
