"""`capture`: a function whose launches are recorded once and replayed.

    the caller's tensors ──copy──▶ buffers ──the recorded launches──▶ results ──copy──▶ the caller

1. A *record* is a CUDA graph of torch: launches at fixed addresses.  So arguments are copied into
   buffers before each replay, and results out of the record's memory after it.
2. Arguments of one *signature* share a record: one structure, and tensors of equal shapes, dtypes
   and `requires_grad`.  Arguments that are no tensors are constants of the record, so other values
   are another signature.  MOST_RECORDS records are kept, those used last.
3. Dimensions in `sizes` are not part of the signature: buffers have room for more rows.  A call
   that does not fit is recorded anew with more room, and a warning says so.
4. Padding is filled so that the function computes with it and gets no NaN (`layout.py`).  It must
   be in no result; before a record is made, a call with padding is compared with the same call
   without (`comparison.py`).
5. Each call has the effects of one call of the function, also while the record is made
   (`records.py`): a training step may be the function.
6. Plans of index tables among the arguments are made in the record (`core/recorded.py`).  A graph,
   infos and `torchweft.constant` that the function closes over are fixed, and cost nothing.
"""

from __future__ import annotations

import enum
import functools
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchweft.capturing.graphs import CudaGraphs, Recorder
from torchweft.capturing.layout import Layout, Sizes, named_in, named_leaves
from torchweft.capturing.leaves import flatten
from torchweft.capturing.records import Record
from torchweft.core.recorded import Current
from torchweft.errors import DeviceError, DTypeError, ShapeError

__all__ = ["CapturedFunction", "capture"]

F = TypeVar("F", bound=Callable[..., Any])

MOST_RECORDS = 16
"""Records of one function."""

SHOWN = 240
"""Characters of a structure in an error."""

_SINGLE = types.NoneType, enum.Enum, torch.dtype, torch.layout, torch.memory_format
"""Types whose objects are values, although they are compared by identity."""


def capture(function: F, *examples: Any, sizes: Sizes | None = None) -> F:
    """The function, whose launches on a GPU are recorded once as a CUDA graph and replayed.

    A replay takes the host one call, however many launches it has. On the CPU the function itself
    is returned. The first call runs the function as it is, the second rehearses, the third records;
    each has the effects and the results of one call, and gradients inside the function (forces, a
    training step) are part of the record.

    Args:
        function: of tensors, or tuples, lists and dicts of tensors. It must not wait for the GPU,
            not write to its arguments, and not depend on Python values that change: other state
            (parameters, states of optimizers, velocities) is read and written in place by each
            replay. A training step holds `optimizer.zero_grad()`, `loss.backward()` and
            `optimizer.step()`, of an optimizer made with `capturable=True`.
        *examples: arguments of a call; the function is not called with them.
        sizes: dimensions that vary from call to call, with room: `{"edges": 1.1}` has room for ten
            in a hundred more rows than the examples. The name is that of a tensor argument (a
            parameter, or a key of a dict) whose first dimension it is, or (name, dimension); all
            dimensions of the same length in the examples vary with it. Padding rows repeat the
            first rows of the call; a pair (factor, {name: fill}) fills arguments with numbers
            (weights with 0), or tables with padding rows of a size that is named; of an argument
            that is named there as (name, dimension), no other dimension varies. For a
            SparseTensor of other voxels in each call, or that of another library's stand-in, see
            `torchweft.voxels.padded_sizes`.

    Returns:
        The function of the same arguments, without keywords. Its results are detached copies,
        without padding; nothing overwrites them.

    Raises:
        CaptureError: when called: a line waits for the GPU (it is named), the function writes to an
            argument, a result is on the CPU, or padding is in a result.
        ShapeError, DTypeError: `sizes` do not fit the examples, or the arguments the examples.
        DeviceError: arguments on several devices.

    Cost: memory of one call for each signature, of which 16 are kept, and a copy of the
    arguments and results a call. Index tables that are arguments are sorted at each replay. With
    sizes, ranks that the function exchanges with compare whether there is room: at each call one
    all_reduce between the hosts.

    Example:
        >>> import torch, torchweft
        >>> def energy(x, weight):
        ...     return (weight * x.square().sum(-1)).sum()
        >>> x, weight = torch.ones(5, 3), torch.ones(5)
        >>> run = torchweft.capture(energy, x, weight, sizes={"x": (1.1, {"weight": 0})})
        >>> run(x, weight)
        tensor(15.)
    """
    leaves, _ = flatten(tuple(examples))
    device = _device(named_leaves(function, examples), leaves)
    recorder = CudaGraphs(device) if device.type == "cuda" else None
    captured: Any = CapturedFunction(function, examples, sizes, recorder)
    return function if recorder is None else captured


class CapturedFunction:
    """A function with its records.

    Args:
        function: what is recorded.
        examples: arguments of a call.
        sizes: see `capture`.
        recorder: makes the records; None: it is not called.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[Any],
        sizes: Sizes | None,
        recorder: Recorder | None,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function, self._recorder = function, recorder
        names, named = named_leaves(function, examples), named_in(sizes)
        self._varied = {i for i, name in enumerate(names) if name in named}
        leaves, self._structure = flatten(tuple(examples), self._varied)
        self._layout = Layout(names, leaves, sizes)
        self._rooms = self._layout.rooms(self._layout.lengths(leaves), (0,) * len(sizes or ()))
        self._varying = tuple(-1 - i for i in range(len(self._rooms)))  # in the place of lengths
        self._records: OrderedDict[Hashable, Record] = OrderedDict()
        self._told = False

    def __call__(self, *arguments: Any) -> Any:
        """The results of a replay, or of the calls before there is a record."""
        if Current.run is not None:  # part of another record
            return self._function(*arguments)
        leaves, structure = flatten(arguments, self._varied)
        signature = (structure, *self._described(leaves, structure), *_modes(self._function))
        record = self._records.get(signature)
        if record is None:
            record = self._records[signature] = self._new(arguments, leaves, structure)
        self._records.move_to_end(signature)
        return record(leaves)

    def _described(self, leaves: Sequence[Any], structure: Any) -> list[Hashable]:
        """What a record depends on of each leaf; lengths that vary are not part of it."""
        if self._layout.sizes and structure != self._structure:
            given, known = str(structure), str(self._structure)
            raise ShapeError(
                f"the arguments are {_differing(given, known)} but the examples were "
                f"{_differing(known, given)}: with sizes they must have one structure, sparse "
                "tensors the same maps. Prepare sparse tensors for the network; for other "
                "arguments capture the function again."
            )
        found: list[Hashable] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._layout.check_dim(i, leaf)
                shape = self._layout.shape(i, leaf.shape, self._varying)
                found.append((*shape, leaf.dtype, leaf.device, leaf.requires_grad))
            else:
                found.append((type(leaf), _constant(leaf)))
        return found

    def _new(self, arguments: Sequence[Any], leaves: Sequence[Any], structure: Any) -> Record:
        names = named_leaves(self._function, arguments)
        _device(names, leaves)
        layout = self._layout if self._layout.sizes else Layout(names, leaves, None)
        if len(self._records) >= MOST_RECORDS:
            self._records.popitem(last=False)
            if not self._told:
                self._told = True
                warnings.warn(
                    f"{self._function} was called with more than {MOST_RECORDS} signatures, "
                    "of which the last are kept: those before are recorded again. Name dimensions "
                    "that vary in sizes, and pass numbers that vary as tensors.",
                    stacklevel=3,
                )
        assert self._recorder is not None
        return Record(self._function, structure, layout, self._recorder, self._rooms)


def _device(names: Sequence[str], leaves: Sequence[Any]) -> torch.device:
    """The device of all tensors."""
    tensors = {name: t for name, t in zip(names, leaves, strict=True) if isinstance(t, Tensor)}
    if not tensors:
        raise ShapeError(
            "there is no tensor among the arguments: they tell the device, and the values that "
            "change from call to call. Pass such tensors, e.g. the batch of a training step."
        )
    (first, known), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != known.device:
            raise DeviceError(
                f"{name} is on {tensor.device} and {first} on {known.device}: a record reads "
                f"memory of one device. Pass {name}.to({str(known.device)!r})."
            )
    return known.device


def _differing(text: str, other: str) -> str:
    """A text, or of a long one the part where it differs from another."""
    if len(text) <= SHOWN:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    return f"… {text[max(0, same - SHOWN // 2) : same + SHOWN // 2]} …"


def _constant(leaf: Any) -> Hashable:
    """An argument that is no tensor, compared by its value."""
    own: Any = type(leaf)
    if isinstance(leaf, _SINGLE):
        return leaf
    if own.__eq__ is object.__eq__ or own.__hash__ is None:
        raise DTypeError(
            f"an argument is a {type(leaf).__name__}: what is no tensor must be a value, such as a "
            "number or a string, since tensors that an object holds may be replaced. Pass its "
            "tensors, in a dict if they are many, or let the function close over it."
        )
    return leaf if leaf == leaf else None  # NaN


def _modes(function: Callable[..., Any]) -> tuple[Hashable, ...]:
    """States of torch, and of a module, that a record depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        getattr(function, "training", None),
    )
