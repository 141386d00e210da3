"""Samples concatenated to a batch, the batch number in the first column."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import ShapeError

__all__ = ["SparseCollation", "batch_sparse_collate", "batched_coordinates", "sparse_collate"]


def batched_coordinates(
    coords: Sequence[Any],
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> Tensor:
    """(ΣN, 1 + D): the coordinates of samples, rounded down for integers.

    >>> batched_coordinates([torch.tensor([[5, 7]]), torch.tensor([[0.0, 1.9]])]).tolist()
    [[0, 5, 7], [1, 0, 1]]

    Args:
        coords: (N_b, D) of NumPy or torch for each sample.
        dtype: torch.int32, or torch.float32 for a TensorField.
        device: of the result; None: that of the first sample.
    """
    samples = [torch.as_tensor(c) for c in coords]
    widths = {c.shape[1] if c.dim() == 2 else None for c in samples}
    if len(widths) != 1 or None in widths or dtype not in (torch.int32, torch.float32):
        raise ShapeError(
            f"coordinates are {[tuple(c.shape) for c in samples]} and dtype {dtype}: one or more "
            "(N, D) with one D, and int32 or float32, are needed. Correct the samples."
        )
    samples = [c.floor() if dtype == torch.int32 and c.is_floating_point() else c for c in samples]
    device = samples[0].device if device is None else device
    rows = torch.cat([c.to(device, dtype) for c in samples])
    sizes = torch.tensor([len(c) for c in samples], device=device)
    batch = torch.arange(len(samples), device=device).repeat_interleave(sizes)
    return torch.cat((batch.unsqueeze(1).to(dtype), rows), 1)


def sparse_collate(
    coords: Sequence[Any],
    feats: Sequence[Any],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple[Any, ...]:
    """`batched_coordinates`, the features, and the labels if given, each concatenated.

    Labels that are no arrays stay a list.
    """
    rows, features = batched_coordinates(coords, dtype, device), [torch.as_tensor(f) for f in feats]
    counts = [len(c) for c in coords], [len(f) for f in features]
    if counts[0] != counts[1]:
        raise ShapeError(
            f"samples have {counts[0]} coordinates and {counts[1]} features: as many of each are "
            "needed. Correct the samples."
        )
    if labels is None:
        return rows, torch.cat(features)
    whole = all(hasattr(label, "shape") and label.shape for label in labels)
    targets = torch.cat([torch.as_tensor(n) for n in labels]) if whole else list(labels)
    return rows, torch.cat(features), targets


def batch_sparse_collate(
    data: Sequence[Sequence[Any]],
    dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
) -> tuple[Any, ...]:
    """`sparse_collate` of (coordinates, features, labels) of the samples of a DataLoader."""
    coords, feats, *labels = zip(*data, strict=True)
    return sparse_collate(coords, feats, labels[0] if labels else None, dtype, device)


class SparseCollation:
    """`batch_sparse_collate` of the first samples that have at most so many points together.

    Args:
        limit_numpoints: that number; none if it is not positive.
        dtype: see `batched_coordinates`.
        device: see `batched_coordinates`.
    """

    def __init__(
        self,
        limit_numpoints: int = -1,
        dtype: torch.dtype = torch.int32,
        device: torch.device | str | None = None,
    ) -> None:
        self.limit_numpoints, self.dtype, self.device = limit_numpoints, dtype, device

    def __call__(self, list_data: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """The batch of a list of samples."""
        kept: list[Sequence[Any]] = []
        points = 0
        for sample in list_data:
            points += len(sample[0])
            if 0 < self.limit_numpoints < points:
                logging.getLogger(__name__).warning(
                    "%d of %d samples fit into %d points: the others are left out.",
                    len(kept),
                    len(list_data),
                    self.limit_numpoints,
                )
                break
            kept.append(sample)
        return batch_sparse_collate(kept, self.dtype, self.device)
