"""A batch norm module on features, with what follows it: act(norm(x) + residual).

On a GPU, kernels compute it: for rows of 16 bits or float32 in eager calls, recorded or not.  All
else is computed by torch's operations: rows of float64, on a CPU, calls that are traced (torch's
compiler fuses them), transformed or watched.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchweft.core.backend import choose
from torchweft.core.operators.operands import as_given, same_kind
from torchweft.core.operators.operator import (
    compiling,
    constant_when_compiling,
    forward_level,
    transformed,
    unwatched,
)
from torchweft.voxels.convolution.epilogue import Epilogue, check
from torchweft.voxels.norms import launch, torch_path
from torchweft.voxels.norms.launch import Normal, Running
from torchweft.voxels.norms.operator import batch_norm_op

__all__ = ["BatchNorm", "batch_norm", "by_batch", "folded", "rank_norm"]

BatchNorm: TypeAlias = Any
"""torch.nn.BatchNorm1d, or a module with its attributes."""

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def batch_norm(
    norm: BatchNorm,
    x: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """act(norm(x) + residual); in training the running statistics change, as the module's own do.

    Args:
        norm: torch.nn.BatchNorm1d, or a module with its attributes.
        x: (N, C).
        residual: (N, C) in the dtype of x; under autocast in any dtype.
        activation: a name of ACTIVATIONS.
        backend: "triton", "torch"; None chooses.

    Raises:
        ShapeError: a residual or an activation that does not fit.
        DTypeError, DeviceError: a residual of another kind.
        ValueError: torch's error of a single row in training.
    """
    residual = _checked(x, residual, activation)
    if not _by_kernels(norm, x, backend):
        y = nn.BatchNorm1d.forward(norm, x)
        return Epilogue(None, None, residual, activation)(y)
    kind, x = "fixed", x.contiguous()
    mean, var = norm.running_mean, norm.running_var
    if by_batch(norm):
        if x.shape[0] < 2:
            return nn.BatchNorm1d.forward(norm, x)  # raises
        kind = "batch"
        mean, var = launch.statistics(x.detach(), _running(norm))
    rest = None if residual is None else residual.contiguous()
    tensors = (norm.weight, norm.bias, rest, mean, var, None)
    return batch_norm_op(x, *tensors, activation, kind, norm.eps)


def rank_norm(
    norm: BatchNorm,
    x: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """act(norm(x) + residual) by the statistics of all ranks, and these: mean, var and count."""
    residual = _checked(x, residual, activation)
    if not _by_kernels(norm, x, backend):
        rows = torch_path.wide(x)  # once: its gradient is rounded once
        found = torch_path.rank_statistics(rows)
        given = (norm.weight, norm.bias, residual, found[:2], activation, norm.eps)
        return torch_path.normalised(rows, *given).to(x.dtype), found
    size, x = x.shape[0], x.contiguous()
    zero = x.new_zeros(x.shape[1], dtype=torch.float64)
    own = launch.statistics(x.detach()) if size else (zero, zero)
    mean, var = (t.double() for t in own)
    found = torch_path.all_statistics(size * mean, size * (var + mean.square()), size)
    mean, var = found[0].float(), found[1].float()
    rest = None if residual is None else residual.contiguous()
    tensors = (norm.weight, norm.bias, rest, mean, var, found[2])
    return batch_norm_op(x, *tensors, activation, "ranks", norm.eps), found


def by_batch(norm: BatchNorm) -> bool:
    """Whether statistics are those of the batch."""
    return bool(norm.training) or norm.running_mean is None


def folded(norm: BatchNorm, added: Tensor | None, backend: str | None) -> tuple[Tensor, Tensor]:
    """(scale, shift) of evaluation: norm(x + added) = x · scale + shift, without gradients."""
    normal = Normal(
        norm.weight, norm.bias, None, norm.running_mean, norm.running_var, None, norm.eps
    )
    with torch.no_grad():
        if _by_kernels(norm, norm.running_mean, backend):
            return launch.fold(normal, added)
        return torch_path.scale_and_shift(*normal[:2], normal[3:5], added, norm.eps)


def _checked(x: Tensor, residual: Tensor | None, activation: str | None) -> Tensor | None:
    """The residual in the dtype of x."""
    if residual is not None or activation is not None:
        check(Epilogue(None, None, residual, activation), *x.shape)
    if residual is None:
        return None
    if residual.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
        return residual.to(x.dtype)
    return same_kind(as_given, x=x, residual=residual)[1]


def _by_kernels(norm: BatchNorm, x: Tensor, backend: str | None) -> bool:
    """Whether kernels compute a call; parameters of other dtypes are left to torch, which raises.

    Raises:
        BackendError: the requested backend cannot serve here.
    """
    if _serving(backend, x.device.type) != "triton" or x.dtype not in KERNEL_DTYPES:
        return False
    if compiling() or transformed() or forward_level() >= 0 or not unwatched(x):
        return False
    state = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    known = (x.dtype, torch.float32)
    return all(t is None or (t.dtype in known and _readable(t, x.device)) for t in state)


@constant_when_compiling
def _serving(backend: str | None, device: str) -> str:
    return choose("torch" if backend is None and device != "cuda" else backend, device)


def _readable(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.is_contiguous() and unwatched(tensor)


def _running(norm: BatchNorm) -> Running | None:
    """The running statistics that training changes; one more batch is counted."""
    if not (norm.training and norm.track_running_stats) or norm.running_mean is None:
        return None
    if norm.momentum is None:
        norm.num_batches_tracked.add_(1)
    return Running(norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum)
