"""Whether padding is in a result: a call with padding against the same call without."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.collectives import Group
from torchweft.core.operators.operator import Observer
from torchweft.errors import CaptureError

__all__ = ["Written", "check_agreement"]


# torch's dispatch modes have no types
class Written(Observer):  # type: ignore[no-untyped-call]
    """Notes memory that operations write and did not make: parameters, states of optimizers.

    groups: those in which ranks exchanged something, by name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: dict[str, Group] = {}
        self._made: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}  # a storage, and its copy

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        for argument, value in itertools.zip_longest(function._schema.arguments, args):
            value = given.get(argument.name, value)
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.note_written(_tensors(value))
            elif (group := private.group_of(argument.name, value)) is not None:
                self.groups[private.group_name(group)] = group
        results = function(*args, **(kwargs or {}))
        if all(result.alias_info is None for result in function._schema.returns):
            for tensor in _tensors(results):
                self._made.add(tensor.untyped_storage()._cdata)
        return results

    def note_written(self, tensors: Iterable[Tensor]) -> None:
        """Keep what tensors hold before they are written."""
        for tensor in tensors:
            storage: Any = tensor.untyped_storage()  # which has no types
            if storage._cdata not in self._made and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What was written is as before inside, and as it is now afterwards."""
        now = [(storage, storage.clone()) for storage, _ in self._before.values()]
        for storage, before in self._before.values():
            storage.copy_(before)
        try:
            yield
        finally:
            for storage, after in now:
                storage.copy_(after)


def check_agreement(
    padded: Sequence[Any], plain: Sequence[Any], arguments: Sequence[Any], rooms: str
) -> None:
    """Raise CaptureError unless results with padding are those without, up to rounding.

    They agree to half of the digits: |padded − plain| ≤ √u·max|plain| + (64 + n) u·max|any real
    number of the call|, u the unit round-off and n the longest dimension of an argument, since what
    n numbers sum to may cancel after it was rounded; other numbers than real ones are equal.
    """
    pairs = list(zip(padded, plain, strict=True))
    if not any(isinstance(b, Tensor) for _, b in pairs):
        raise CaptureError(
            "the function returns no tensor, so nothing shows that padding is in no result. Return "
            "one, e.g. the loss, or leave out sizes."
        )
    longest = max((max(t.shape, default=0) for t in _tensors(arguments)), default=0)
    rounded = (64 + longest) * max(_magnitude(t) for t in (*plain, *arguments))
    for i, (a, b) in enumerate(pairs):
        if isinstance(b, Tensor) and not _agree(a, b, rounded):
            raise CaptureError(
                f"result {i} differs with padding: {_shown(a)} where it is {_shown(b)} without. "
                f"Padding (room for {rooms}) must be in no result. Leave it out of sums and means, "
                "e.g. by weights that sizes fills with 0, or by owners of rows that sizes fills "
                "with a padding row. Draw random numbers by dropout, rand, randn, their _like or "
                "bernoulli_ alone: others differ with padding."
            )


def _agree(padded: Tensor, plain: Tensor, rounded: float) -> bool:
    if not plain.is_floating_point() and not plain.is_complex():
        return bool((padded == plain).all())
    u = torch.finfo(plain.dtype).eps
    bound = u**0.5 * _magnitude(plain) + u * rounded
    off = (padded - plain).abs()
    return bool(((off <= bound) | (padded == plain) | (padded.isnan() & plain.isnan())).all())


def _magnitude(value: Any) -> float:
    """The largest finite number of a tensor; 0 of integers, which have no rounding."""
    if not isinstance(value, Tensor) or not value.numel():
        return 0.0
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    wide = value.detach().abs().to(torch.float64)
    return float(torch.where(wide.isfinite(), wide, 0).max())


def _shown(value: Tensor) -> str:
    numbers = value.flatten()[:3].tolist()
    more = ", …" if value.numel() > 3 else ""
    return "[" + ", ".join(f"{n:.6g}" for n in numbers) + more + "]"


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in private.flatten(value)[0] if isinstance(t, Tensor)]
