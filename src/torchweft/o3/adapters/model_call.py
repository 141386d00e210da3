"""What layers of a model share in a call: the graph, the element of each node, the first call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core import private, recorded
from torchweft.core.explain import recording as explaining
from torchweft.core.gpu.ahead import compile_ahead
from torchweft.core.operators.operator import (
    PLAIN,
    below_transforms,
    compiling,
    transformed,
    unwatched,
)
from torchweft.core.table_copies import copies_of, mark_constant
from torchweft.core.tables import TensorCache
from torchweft.o3.adapters.sources import Current as Reading
from torchweft.o3.graph import Graph, graph_of
from torchweft.o3.sorting.rows import columns_of_rows

__all__ = ["Call"]


class _Elements(NamedTuple):
    """Attributes (N, num_elements) of nodes, and the column of the 1 in each row."""

    attributes: Tensor
    element: Tensor | None  # (N,); None: not all rows are one-hot, or nobody knows
    marked: Tensor  # the attributes; in a record NaN in place of rows that are not one-hot


def _runs_alone(model: nn.Module) -> bool:
    """Whether a model is on a GPU, and nobody watches or records its operations."""
    tensors = [*model.parameters(), *model.buffers()]
    return (
        any(t.is_cuda for t in tensors)
        and all(type(t) in PLAIN for t in tensors)
        and not (transformed() or private.dispatch_modes() or torch.is_anomaly_enabled())
        and not explaining()
        and recorded.Current.run is None
        and Reading.sources is None
        and not torch.cuda.is_current_stream_capturing()
    )


class _Tables(NamedTuple):
    """Edges of a call, and the graphs that were made of them."""

    edge_index: Tensor
    rows: Sequence[Any]  # its two, or constant copies of them
    graphs: list[tuple[tuple[int, int], Graph]]  # with the numbers of nodes and of sources


def _compares(table: Tensor) -> bool:
    """Whether a call looks at the values of a table."""
    usual = not (compiling() or transformed()) and recorded.Current.run is None
    return usual and unwatched(table)


def _rehearse(model: nn.Module, args: Any, kwargs: Any) -> None:
    """A call and, of a model that is trained, the gradients of its results; nothing is kept."""
    buffers = [(buffer, recorded.version(buffer), buffer.clone()) for buffer in model.buffers()]
    args, kwargs = [_copy(a) for a in args], {n: _copy(a) for n, a in kwargs.items()}
    devices = {t.device for t in [*model.parameters(), *model.buffers()] if t.is_cuda}
    with torch.random.fork_rng(devices):
        try:
            results = model(*args, **kwargs)
            if model.training:
                _differentiate(results, [*model.parameters(), *_tensors((args, kwargs))])
        finally:
            for buffer, version, value in buffers:
                if recorded.version(buffer) != version:
                    buffer.copy_(value)


def _copy(argument: Any) -> Any:
    """A container of its own: models add to those that they are given."""
    return argument if isinstance(argument, Tensor) else copy.copy(argument)


def _differentiate(results: Any, inputs: Iterable[Tensor]) -> None:
    """The gradients of all results, by the inputs that need one."""
    of = [t for t in _tensors(results) if t.requires_grad]
    by = [t for t in inputs if t.requires_grad]
    if of and by:
        torch.autograd.grad(of, by, [torch.ones_like(t) for t in of], allow_unused=True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in private.flatten(tree)[0] if isinstance(leaf, Tensor)]


class Call:
    """Keeps the graphs and the elements that the first layer of a call made for those behind it.

    `begin` and `end` are hooks of the model.  Layers that are called without the model, or with
    other tensors than the ones before, find their own.

    The first call of each kind on a GPU is made twice: first for its kernels, which are compiled
    side by side, then for its results.  Hooks of the model and its layers see both.
    """

    def __init__(self) -> None:
        self.running = False
        self._kinds = set[tuple[Any, ...]]()
        self._tables: _Tables | None = None
        self._elements: _Elements | None = None
        self._were_one_hot = self._marks = False

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the forward pass of the model."""
        if not compiling():
            self._compile_ahead(model, args, kwargs)
        self.running = True

    def _compile_ahead(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compile what a call of a new kind will launch."""
        flags = (v for v in (*args, *kwargs.values()) if isinstance(v, bool))
        kind = (model.training, torch.is_grad_enabled(), *kwargs, *flags)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        if _runs_alone(model):
            compile_ahead(functools.partial(_rehearse, model, args, kwargs))

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        """After it, also where it has raised."""
        self.running = False
        self._tables = self._elements = None

    def read(self, edge_index: Tensor, attributes: Tensor) -> None:
        """Compare both with what the last calls were given, at once, before there is work.

        On a GPU the host waits for the answer; it need not in the layers behind.
        """
        if not (self.running and _compares(edge_index) and _compares(attributes)):
            return
        compared = None if attributes.requires_grad else attributes
        *rows, known = copies_of((edge_index[0], edge_index[1], compared))
        self._tables = _Tables(edge_index, rows, [])
        if known is not None:
            found = self._found(known)
            self._elements = found._replace(attributes=attributes, marked=attributes)

    def graph(self, edge_index: Tensor, num_nodes: int, num_sources: int, src: int = 0) -> Graph:
        """The graph of edge_index (2, E), whose row `src` has the sources in every call."""
        tables, sizes = self._tables, (num_nodes, num_sources)
        if tables is None or tables.edge_index is not edge_index:
            rows: Sequence[Any] = edge_index[0], edge_index[1]
            rows = copies_of(rows) if _compares(edge_index) else rows
            tables = _Tables(edge_index, rows, [])
            if self.running:
                self._tables = tables
        for kept, graph in tables.graphs:
            if kept == sizes:
                return graph
        graph = graph_of(tables.rows[src], tables.rows[1 - src], *sizes)
        tables.graphs.append((sizes, graph))
        return graph

    def mark(self, layers: Iterable[nn.Module]) -> None:
        """Let layers that are linear in attributes, their first argument, take these as marked."""
        for layer in layers:
            layer.register_forward_pre_hook(self._marked)
            self._marks = True

    def _marked(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if recorded.Current.run is None or not args:
            return args
        return self._elements_of(args[0]).marked, *args[1:]

    def elements(self, attributes: Tensor) -> Tensor | None:
        """The column (N,) of the 1 in each row of attributes (N, num_elements).

        None where these are mixtures or need a gradient, and inside torch.compile and transforms,
        where values are unknown: rows are then multiplied.

        A function of torchweft.capture cannot look at values either.  If the last attributes that
        could be read were one-hot, its record takes those of a replay for one-hot too, where layers
        are marked (`mark`): their rows are NaN for attributes that are not.
        """
        return self._elements_of(attributes).element

    def _elements_of(self, attributes: Tensor) -> _Elements:
        kept = self._elements
        if kept is not None and kept.attributes is attributes:
            return kept
        found = self._found(attributes)
        if self.running:
            self._elements = found
        return found

    def _found(self, attributes: Tensor) -> _Elements:
        unknown = _Elements(attributes, None, attributes)
        if compiling() or transformed() or attributes.requires_grad or not unwatched(attributes):
            return unknown
        if recorded.Current.run is not None:
            chosen = self._marks and self._were_one_hot and attributes.shape[1] > 0
            return _Elements(attributes, *columns_of_rows(attributes)) if chosen else unknown
        (copy,) = copies_of((attributes,))
        assert copy is not None
        element = _columns_cache.get((copy,), None, lambda: _columns(copy))
        self._were_one_hot = element is not None
        return unknown._replace(element=element)


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
