"""Modules that join lists of tensors, with spconv's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchweft.compat.spconv.pytorch.core import SparseConvTensor, check_same_voxels
from torchweft.compat.spconv.pytorch.functional import sparse_add
from torchweft.compat.spconv.pytorch.modules import SparseModule

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable"]


class JoinTable(SparseModule):
    """The channels of tensors on the same voxels, concatenated."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """(N, ΣC) on the first tensor's voxels, with its indice_dict."""
        for other in input[1:]:
            check_same_voxels(input[0], other, "JoinTable")
        return input[0].replace_feature(torch.cat([t.features for t in input], 1))


class AddTable(SparseModule):
    """The sum of tensors on the same voxels."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """(N, C) on the first tensor's voxels, with its indice_dict."""
        total = input[0]
        for other in input[1:]:
            total = total + other
        return total


class AddTableMisaligned(SparseModule):
    """The sum of tensors on any voxels; see `functional.sparse_add`."""

    def forward(self, input: Sequence[SparseConvTensor]) -> SparseConvTensor:
        """On every voxel that a tensor has."""
        return sparse_add(*input)


class ConcatTable(SparseModule):
    """The results of several modules on one input, as a list."""

    def forward(self, input: Any) -> list[Any]:
        """One result per module."""
        return [module(input) for module in self.children()]

    def add(self, module: nn.Module) -> ConcatTable:
        """Append a module; returns the table."""
        self.add_module(str(len(self._modules)), module)
        return self
