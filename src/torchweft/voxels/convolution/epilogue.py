"""What may follow a convolution, in the pass that writes its result: a norm, a sum, a function."""

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
    """act((y − mean) / √(var + eps) · scale + shift + residual); None omits a step.

    The first five are tensors.

    Args:
        scale: (C_out,).
        shift: (C_out,).
        residual: (N_out, C_out).
        mean: (C_out,), None where var is.
        var: (C_out,).
        activation: a name of ACTIVATIONS.
        eps: is added to var.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    activation: str | None = None
    eps: float = 0.0

    def with_bias(self, bias: Tensor | None) -> Epilogue:
        """The epilogue of y + bias: a part of the mean or of the shift, in float32 at least."""
        if bias is None:
            return self
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
        if self.mean is not None:
            return self._replace(mean=self.mean - bias)
        shift = bias if self.scale is None else bias * self.scale
        return self._replace(shift=shift if self.shift is None else shift + self.shift)

    def to(self, dtype: torch.dtype) -> Epilogue:
        """The same in another dtype."""
        tensors = [None if t is None else t.to(dtype) for t in self[:5]]
        scale, shift, residual, mean, var = tensors
        return Epilogue(scale, shift, residual, mean, var, self.activation, self.eps)

    def __call__(self, y: Tensor) -> Tensor:
        """Apply the steps to a result one after the other."""
        scale, shift, *_ = self.folded()
        y = y if scale is None else y * scale
        y = y if shift is None else y + shift
        y = y if self.residual is None else y + self.residual
        return y if self.activation is None else ACTIVATIONS[self.activation](y)

    def folded(self) -> Epilogue:
        """The same, with mean and variance in scale and shift."""
        if self.mean is None or self.var is None:
            return self
        scale = (self.var + self.eps).rsqrt()
        scale = scale if self.scale is None else scale * self.scale
        shift = -self.mean * scale
        shift = shift if self.shift is None else shift + self.shift
        return Epilogue(scale, shift, self.residual, activation=self.activation)


NO_EPILOGUE = Epilogue()


def check(given: Epilogue, rows: int, channels: int) -> None:
    """Raise unless an epilogue fits an output of (rows, channels).

    Raises:
        ShapeError: a shape that does not fit, an unknown activation.
    """
    for name in ("scale", "shift", "residual", "mean", "var"):
        tensor = getattr(given, name)
        needed = (rows, channels) if name == "residual" else (channels,)
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
