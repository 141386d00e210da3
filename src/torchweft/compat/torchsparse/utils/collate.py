"""Samples to batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchweft.compat.torchsparse.tensor import SparseTensor
from torchweft.errors import ShapeError

__all__ = ["sparse_collate", "sparse_collate_fn"]


def sparse_collate(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Samples (N, 3) concatenated to a batch (N, 4), their numbers in the first column.

    Args:
        inputs: tensors, or with arrays of NumPy for coords and feats.

    Raises:
        ShapeError: no sample, or samples at different strides.
    """
    strides = {x.stride for x in inputs}
    if len(strides) != 1:
        raise ShapeError(
            f"sparse_collate was given {len(inputs)} samples at the strides {sorted(strides)}: it "
            "needs at least one, all at one stride. Collate them apart."
        )
    coords = [torch.as_tensor(x.coords) for x in inputs]
    rows = [torch.nn.functional.pad(c, (1, 0), value=k) for k, c in enumerate(coords)]
    feats = [torch.as_tensor(x.feats) for x in inputs]
    return SparseTensor(torch.cat(feats), torch.cat(rows), strides.pop())


def sparse_collate_fn(inputs: Sequence[Any]) -> Any:
    """The samples of a DataLoader by key: tensors are collated or stacked, others listed.

    Args:
        inputs: dictionaries with the same keys, which may be nested; others are returned.
    """
    if not isinstance(inputs[0], dict):
        return inputs
    return {name: _together([x[name] for x in inputs]) for name in inputs[0]}


def _together(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return sparse_collate_fn(values)
    if isinstance(first, SparseTensor):
        return sparse_collate(values)
    if isinstance(first, (np.ndarray, torch.Tensor)):
        return torch.stack([torch.as_tensor(x) for x in values])
    return values
