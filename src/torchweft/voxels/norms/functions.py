"""A batch norm module on features, with what follows it: act(norm(x) + residual).

On a GPU, kernels compute it: for rows of 16 bits or float32 in eager calls, recorded or not.  All
else is computed by torch's operations: rows of float64, on a CPU, calls that are traced (torch's
compiler fuses them), transformed or watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchweft.core import private
from torchweft.core.backend import choose
from torchweft.core.collectives import Group, gathered
from torchweft.core.operators.operands import as_given, same_kind
from torchweft.core.operators.operator import (
    PLAIN,
    compiling,
    constant_when_compiling,
    forward_level,
    transformed,
    unwatched,
)
from torchweft.voxels.convolution.epilogue import ACTIVATIONS, Epilogue, check
from torchweft.voxels.convolution.operator import observed
from torchweft.voxels.norms import launch, torch_path
from torchweft.voxels.norms.launch import Running
from torchweft.voxels.norms.operator import batch_norm_op

__all__ = ["BatchNorm", "batch_norm", "by_batch", "epilogue_of", "rank_norm"]

BatchNorm: TypeAlias = Any
"""torch.nn.BatchNorm1d, or a module with its attributes."""

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def batch_norm(
    norm: BatchNorm,
    x: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """act(norm(x) + residual); in training the running statistics change, as the module's own do.

    Args:
        norm: torch.nn.BatchNorm1d, or a module with its attributes.
        x: (N, C).
        residual: (N, C) in the dtype of x; under autocast in any dtype.
        activation: a name of ACTIVATIONS.
        backend: "triton", "torch"; None chooses.
        valid: () int64 on the device of x: the first `valid` rows are real.  The others are padding
            and may hold anything: they are no part of statistics and of sums, and 0 in the result
            and its gradients.  Without a real row running statistics stay, and of one the variance
            is 0.  None: all rows are real.

    Raises:
        ShapeError: a residual or an activation that does not fit.
        DTypeError, DeviceError: a residual of another kind.
        ValueError: torch's error of a single row in training.
    """
    residual = _checked(x, residual, activation)
    state = _state(norm)
    few = x.shape[0] < 2 and by_batch(norm)
    if few or not _by_kernels(state, x, backend):
        if valid is not None:
            return _padded_norm(norm, x, residual, activation, valid)
        y = nn.BatchNorm1d.forward(norm, x)
        return Epilogue(residual=residual, activation=activation)(y)
    kind, (weight, bias, mean, var) = "fixed", state
    x = x.contiguous()
    if norm.training or mean is None:
        kind, (mean, var) = "batch", launch.statistics(x, _running(norm, mean, var), valid)
    rest = None if residual is None else residual.contiguous()
    tensors = (weight, bias, rest, mean, var, valid, None)
    return batch_norm_op(x, *tensors, activation, kind, None, norm.eps)


def _padded_norm(
    norm: BatchNorm, x: Tensor, residual: Tensor | None, activation: str | None, valid: Tensor
) -> Tensor:
    """`batch_norm` of the first `valid` rows by torch's operations."""
    rows = torch_path.wide(x)  # once: its gradient is rounded once
    mean, var = norm.running_mean, norm.running_var
    if by_batch(norm):
        running = _running(norm, mean, var)
        mean, var = torch_path.statistics(rows, valid)
        if running is not None:
            torch_path.track(running, mean, var, valid)
    given = (norm.weight, norm.bias, residual, (mean, var), activation, norm.eps, valid)
    return torch_path.normalised(rows, *given).to(x.dtype)


def rank_norm(
    norm: BatchNorm,
    x: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
    *,
    group: Group | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """act(norm(x) + residual) by the statistics of all ranks, which the running ones follow.

    The first `valid` rows of this rank are real, see `batch_norm`; there may be none.
    """
    residual = _checked(x, residual, activation)
    state = _state(norm)
    running = _running(norm, *state[2:]) if norm.training else None
    if not _by_kernels(state, x, backend):
        rows = torch_path.wide(x)  # once: its gradient is rounded once
        found = torch_path.rank_statistics(rows, group, valid)
        given = (norm.weight, norm.bias, residual, found[:2], activation, norm.eps, valid)
        if running is not None:
            torch_path.track(running, *found)
        return torch_path.normalised(rows, *given).to(x.dtype)
    x = x.contiguous()
    of_ranks = gathered(launch.statistics_of_rank(x, valid), group)
    mean, var, count = launch.joined(x, of_ranks, running)
    rest = None if residual is None else residual.contiguous()
    tensors = (norm.weight, norm.bias, rest, mean, var, valid, count)
    name = private.group_name(group)
    return batch_norm_op(x, *tensors, activation, "ranks", name, norm.eps)


def by_batch(norm: BatchNorm) -> bool:
    """Whether statistics are those of the batch."""
    return bool(norm.training) or norm.running_mean is None


def epilogue_of(
    norm: BatchNorm | None,
    operands: Sequence[Tensor | None],
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Epilogue | None:
    """The epilogue act(norm(y) + residual) of the convolution that computes y.

    None where a pass of its own must compute it: gradients are recorded, the norm takes statistics
    of its batch, or the call is compiled, transformed or watched.

    Args:
        norm: torch.nn.BatchNorm1d, a module with its attributes, or None.
        operands: of the convolution: features, weight and bias.
        residual: (N, C).
        activation: a name of ACTIVATIONS.
    """
    if norm is None:
        after = Epilogue(residual=residual, activation=activation)
    elif by_batch(norm):
        return None
    else:
        tensors = norm.weight, norm.bias, residual, norm.running_mean, norm.running_var
        after = Epilogue(*tensors, activation, norm.eps)
    return None if observed(*operands, *after[:3]) else after


def _checked(x: Tensor, residual: Tensor | None, activation: str | None) -> Tensor | None:
    """The residual in the dtype of x."""
    if residual is None and (activation is None or activation in ACTIVATIONS):
        return None
    check(Epilogue(residual=residual, activation=activation), *x.shape)
    assert residual is not None  # check raises for other activations
    if residual.dtype != x.dtype and torch.is_autocast_enabled(x.device.type):
        return residual.to(x.dtype)
    return same_kind(as_given, x=x, residual=residual)[1]


_State = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Weight, bias, running mean and variance of a norm."""


def _state(norm: BatchNorm) -> _State:
    return norm.weight, norm.bias, norm.running_mean, norm.running_var


def _by_kernels(state: _State, x: Tensor, backend: str | None) -> bool:
    """Whether kernels compute a call; parameters of other dtypes are left to torch, which raises.

    Raises:
        BackendError: the requested backend cannot serve here.
    """
    dtype, device = x.dtype, x.device
    if _serving(backend, device.type) != "triton" or dtype not in KERNEL_DTYPES:
        return False
    if compiling() or transformed() or forward_level() >= 0 or not unwatched(x):
        return False
    for t in state:
        if t is not None:
            known = (t.dtype == dtype or t.dtype == torch.float32) and t.device == device
            if not known or type(t) not in PLAIN or not t.is_contiguous():
                return False
    return True


@constant_when_compiling
def _serving(backend: str | None, device: str) -> str:
    return choose("torch" if backend is None and device != "cuda" else backend, device)


def _running(norm: BatchNorm, mean: Tensor | None, var: Tensor | None) -> Running | None:
    """The running statistics that training changes; one more batch is counted."""
    if mean is None or var is None or not norm.track_running_stats:
        return None
    tracked, momentum = norm.num_batches_tracked, norm.momentum
    if momentum is None:
        tracked.add_(1)
    return Running(mean, var, tracked, momentum)
