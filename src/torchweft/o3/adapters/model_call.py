"""What layers of a model share in a call: the graph, and the element of each node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.operators.operator import below_transforms, compiling, transformed, unwatched
from torchweft.core.table_copies import copies_of, mark_constant, unreadable
from torchweft.core.tables import TensorCache
from torchweft.o3.graph import Graph, graph_of

__all__ = ["Call"]


class Call:
    """Keeps the graph and the elements that the first layer of a call made for those behind it.

    `begin` and `end` are hooks of the model.  Layers that are called without the model, or with
    other tensors than the ones before, find their own.
    """

    def __init__(self) -> None:
        self.running = False
        self._graph: tuple[Tensor, int, Graph] | None = None
        self._element: tuple[Tensor, Tensor | None] | None = None

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward pass of the model."""
        self.running = True

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it has raised."""
        self.running = False
        self._graph = self._element = None

    def graph(self, edge_index: Tensor, num_nodes: int, src: int = 0) -> Graph:
        """The graph of edge_index (2, E), whose row `src` has the sources in every call."""
        kept = self._graph
        if kept is not None and kept[0] is edge_index and kept[1] == num_nodes:
            return kept[2]
        made = graph_of(edge_index[src], edge_index[1 - src], num_nodes, num_nodes)
        if self.running:
            self._graph = edge_index, num_nodes, made
        return made

    def element(self, attributes: Tensor) -> Tensor | None:
        """(N,): the column of the 1 in each row of attributes (N, num_elements).

        None where these are mixtures or need a gradient, and inside torch.compile, transforms and a
        function of torchweft.capture, where values are unknown: rows are then multiplied.
        """
        kept = self._element
        if kept is not None and kept[0] is attributes:
            return kept[1]
        found = _element_of(attributes)
        if self.running:
            self._element = attributes, found
        return found


_elements: TensorCache[Tensor | None] = TensorCache()


def _element_of(attributes: Tensor) -> Tensor | None:
    if compiling() or transformed() or attributes.requires_grad or not unwatched(attributes):
        return None
    if unreadable(attributes):
        return None
    (copy,) = copies_of((attributes,))
    assert copy is not None
    return _elements.get((copy,), None, lambda: _columns(copy))


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
