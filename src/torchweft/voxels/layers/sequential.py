"""Modules one after the other; a batch norm and an activation join the layer before them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchweft.core.operators.operator import compiling
from torchweft.voxels.layers.convolution import (
    SparseConvolution,
    SparseInverseConvolution,
    SparseModule,
)
from torchweft.voxels.layers.norm import SparseBatchNorm
from torchweft.voxels.maps.tensor import SparseTensor
from torchweft.voxels.norms.functions import batch_norm
from torchweft.voxels.norms.modules import activation_name, is_batch_norm

__all__ = ["SparseSequential"]


class SparseSequential(nn.Sequential, SparseModule):
    """Modules one after the other: sparse ones take the tensor, all others its features.

    SparseSequential(SubMConv3d(4, 16, 3), SparseBatchNorm(16), nn.ReLU())

    A convolution, a SparseBatchNorm or torch.nn.BatchNorm1d, and a ReLU, SiLU or exact GELU after
    each other run as `convolution(x, norm=…, activation=…)`: one pass in inference, two in
    training.  A module with hooks runs by itself.

    A custom module that takes a SparseTensor must derive from SparseModule.  After a GlobalPool,
    whose result is dense, every module takes that result.
    """

    def forward(self, x: Any) -> Any:
        """A SparseTensor, or the result of the last module."""
        self.check(x)
        for module, given in _steps(self):
            if not isinstance(x, SparseTensor) or isinstance(module, SparseModule):
                x = module(x, **given)
            elif given:
                x = x.replace(batch_norm(module, x.feats, **given))
            else:
                x = x.replace(module(x.feats))
        return x


_CONVOLUTIONS = (SparseConvolution.forward, SparseInverseConvolution.forward)


def _steps(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Modules, each with what it does of those behind it: `norm` and `activation`."""
    rest = list(modules)[::-1]
    while rest:
        module = rest.pop()
        given: dict[str, Any] = {}
        if not compiling():  # torch's compiler fuses by itself
            convolves = type(module).forward in _CONVOLUTIONS
            if convolves and rest and _is_norm(rest[-1]):
                given["norm"] = rest.pop()
            if rest and (convolves or _is_norm(module)):
                name = activation_name(rest[-1])
                if name is not None:
                    given["activation"] = name
                    rest.pop()
        yield module, given


def _is_norm(module: nn.Module) -> bool:
    return is_batch_norm(module, SparseBatchNorm)
