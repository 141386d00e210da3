"""What layers of a model share in a call: the graph, and the element of each node."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core import recorded
from torchweft.core.operators.operator import below_transforms, compiling, transformed, unwatched
from torchweft.core.table_copies import copies_of, mark_constant
from torchweft.core.tables import TensorCache
from torchweft.o3.graph import Graph, graph_of

__all__ = ["Call", "NodeElements"]


class NodeElements(NamedTuple):
    """Rows of attributes that have one number, 1 or `scale`, in the column `element`."""

    element: Tensor  # (N,)
    scale: Tensor | None  # (N, 1); None: all are 1

    def scaled(self, z: Tensor) -> Tensor:
        """Result of a layer that is linear in the attributes, of its result z (N, D) by element."""
        return z if self.scale is None else z * self.scale.to(z.dtype)


class Call:
    """Keeps the graph and the elements that the first layer of a call made for those behind it.

    `begin` and `end` are hooks of the model.  Layers that are called without the model, or with
    other tensors than the ones before, find their own.
    """

    def __init__(self) -> None:
        self.running = False
        self._graph: tuple[Tensor, int, Graph] | None = None
        self._elements: tuple[Tensor, NodeElements | None] | None = None
        self._were_one_hot = False

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward pass of the model."""
        self.running = True

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it has raised."""
        self.running = False
        self._graph = self._elements = None

    def graph(self, edge_index: Tensor, num_nodes: int, src: int = 0) -> Graph:
        """The graph of edge_index (2, E), whose row `src` has the sources in every call."""
        kept = self._graph
        if kept is not None and kept[0] is edge_index and kept[1] == num_nodes:
            return kept[2]
        made = graph_of(edge_index[src], edge_index[1 - src], num_nodes, num_nodes)
        if self.running:
            self._graph = edge_index, num_nodes, made
        return made

    def elements(self, attributes: Tensor) -> NodeElements | None:
        """The column of the 1 in each row of attributes (N, num_elements).

        None where these are mixtures or need a gradient, and inside torch.compile and transforms,
        where values are unknown: rows are then multiplied.

        A function of torchweft.capture cannot look at values either.  If the last attributes that
        could be read were one-hot, its record takes those of a replay for rows of one number, 0 or
        more, and scales results by it: by NaN where a row has others too.
        """
        kept = self._elements
        if kept is not None and kept[0] is attributes:
            return kept[1]
        found = self._elements_of(attributes)
        if self.running:
            self._elements = attributes, found
        return found

    def _elements_of(self, attributes: Tensor) -> NodeElements | None:
        if compiling() or transformed() or attributes.requires_grad or not unwatched(attributes):
            return None
        if recorded.Current.run is not None:
            return _in_record(attributes) if self._were_one_hot else None
        (copy,) = copies_of((attributes,))
        assert copy is not None
        element = _columns_cache.get((copy,), None, lambda: _columns(copy))
        self._were_one_hot = element is not None
        return None if element is None else NodeElements(element, None)


def _in_record(attributes: Tensor) -> NodeElements | None:
    """Of rows that no host reads."""
    if not attributes.shape[1]:
        return None
    largest, element = attributes.max(1, keepdim=True)
    total = attributes.abs().sum(1, keepdim=True)
    return NodeElements(element[:, 0], torch.where(largest == total, largest, math.nan))


_columns_cache: TensorCache[Tensor | None] = TensorCache()


@below_transforms
def _columns(attributes: Tensor) -> Tensor | None:
    """The column of the 1 in each row; None where a row is not one-hot."""
    with torch.inference_mode(False):
        element = attributes.argmax(1) if attributes.numel() else attributes.new_zeros(0).long()
        one_hot = torch.nn.functional.one_hot(element, attributes.shape[1])
        if not bool((one_hot == attributes).all()):
            return None
        mark_constant(element)
    return element
