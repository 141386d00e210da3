"""The `.grad` that a record fills: the memory that it writes must be the one that the caller reads.

A replay runs no Python, so nobody assigns `.grad` at a replay.  A record either adds to memory that
was there before, or fills its own, where the function itself empties `.grad` first.  Both are put
in place before each replay, whatever the caller has done since: `zero_grad()` outside of the
function sets None.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Gradients", "backward_noted", "leaves_of"]


class Gradients:
    """The gradients of the tensors that a function differentiates by.

    Args:
        leaves: the tensors.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._filled: list[tuple[Tensor, Tensor, bool]] = []
        """Tensor, gradient, and whether the record adds to it."""

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, there are no gradients; afterwards those of before."""
        before = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        try:
            yield
        finally:
            for leaf, grad in zip(self._leaves, before, strict=True):
                leaf.grad = grad

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, the function runs to be recorded: note which gradients it fills, and how.

        If it raises, gradients are those of before: what a record would fill is never computed.
        """
        before = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        begun = [(leaf.grad, leaf.grad._version) for leaf in self._leaves if leaf.grad is not None]
        try:
            yield
        except BaseException:
            for leaf, was in zip(self._leaves, before, strict=True):
                leaf.grad = was
            raise
        for leaf, was, (grad, version) in zip(self._leaves, before, begun, strict=True):
            if leaf.grad is grad and grad._version == version:
                leaf.grad = was
            elif leaf.grad is not None:
                self._filled.append((leaf, leaf.grad, leaf.grad is grad))

    def put_in_place(self) -> None:
        """Before a replay: let the record fill what the caller reads."""
        with torch.no_grad():
            for leaf, grad, added in self._filled:
                if leaf.grad is grad:
                    continue
                if added:
                    grad.zero_() if leaf.grad is None else grad.copy_(leaf.grad)
                leaf.grad = grad


@contextlib.contextmanager
def backward_noted() -> Iterator[list[Tensor]]:
    """A list, to which calls of `backward` inside add the leaves whose gradients they fill.

    Calls of other threads do not.  Results that were detached do not tell these leaves.
    """
    plain: Any = torch.autograd.backward
    thread, found = threading.get_ident(), list[Tensor]()

    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            found.extend(leaves_of([tensors] if isinstance(tensors, Tensor) else list(tensors)))
        plain(tensors, *args, **options)

    torch.autograd.backward = backward
    try:
        yield found
    finally:
        torch.autograd.backward = plain


def leaves_of(results: Sequence[Any]) -> list[Tensor]:
    """The tensors without history that results were computed from and require gradients of."""
    nodes = [t.grad_fn for t in results if isinstance(t, Tensor) and t.grad_fn is not None]
    seen, found = set(nodes), list[Tensor]()
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        nodes += more
    return found
