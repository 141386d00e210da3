"""Initial values of kernels."""

from __future__ import annotations

import math

from torch import Tensor, nn

from torchweft.errors import ShapeError

__all__ = ["kaiming_normal_"]


def kaiming_normal_(
    tensor: Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """N(0, gain² / fan) in place, for a kernel (K, C_in, C_out): fan_in is K C_in, fan_out K C_out.

    Of a kernel (C_in, C_out), as the original: fan_in is C_out and fan_out C_in.

    Args:
        tensor: the kernel.
        a: the slope of leaky_relu.
        mode: "fan_in" or "fan_out".
        nonlinearity: see torch.nn.init.calculate_gain.
    """
    mode = mode.lower()
    if mode not in ("fan_in", "fan_out") or tensor.dim() < 2:
        raise ShapeError(
            f"mode is {mode!r} and the kernel {tuple(tensor.shape)}: 'fan_in' or 'fan_out' and two "
            "or three dimensions are needed. Pass module.kernel."
        )
    inner, outer = tensor.shape[-2:] if tensor.dim() > 2 else tensor.shape[::-1]
    fan = (inner if mode == "fan_in" else outer) * (len(tensor) if tensor.dim() > 2 else 1)
    gain = nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    return nn.init.normal_(tensor, 0, gain / math.sqrt(fan))
