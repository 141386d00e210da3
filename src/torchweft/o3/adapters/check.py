"""A model beside its conversion, on a structure of the user's own."""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.default_dtype import default_dtype
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters.allegro import from_allegro
from torchweft.o3.adapters.e3nn import from_e3nn
from torchweft.o3.adapters.mace import from_mace
from torchweft.o3.adapters.nequip import from_nequip
from torchweft.o3.adapters.replacing import holds, is_of
from torchweft.o3.adapters.sevennet import from_sevennet

__all__ = ["Comparison", "Report", "Turned", "check"]

CALLS = 5  # of each model, in turn
_CONVERTERS = {
    ("mace", "InteractionBlock"): from_mace,
    ("allegro", "Contracter"): from_allegro,
    ("nequip", "TensorProductScatter"): from_nequip,
    ("sevenn", "AtomGraphSequential"): from_sevennet,
}
_RESULTS = {
    "energy": ("energy", "total_energy", "inferred_total_energy"),
    "forces": ("forces", "inferred_force"),
    "stress": ("stress", "inferred_stress"),
}
"""What a model's dictionary holds, under the names of MACE, NequIP and SevenNet."""


class Comparison(NamedTuple):
    """A result of both models, in its own unit; errors are against the original in float64."""

    name: str
    largest: float  # |value| of the original
    difference: float  # largest |ours − original|
    error_original: float  # largest |original − float64|; 0 where the original is float64
    error_torchweft: float

    @property
    def relative(self) -> float:
        """The difference over the largest value."""
        return self.difference / self.largest if self.largest else self.difference


class Turned(NamedTuple):
    """A module that torchweft took the place of."""

    name: str
    original: str  # classes
    torchweft: str


@dataclass(frozen=True)
class Report:
    """What `check` found; `str(report)` is a table.

    Attributes:
        comparisons: energy, forces and stress, as far as the model returns them.
        turned: modules that are torchweft's now.
        left: (name, class) of the other modules that compute: e3nn's, and the model's own.
        ms_original: milliseconds of a call, forces included: the median of five that came in turn
            with those of the converted model, after first calls of both.
        ms_torchweft: the same, converted.
    """

    comparisons: tuple[Comparison, ...]
    turned: tuple[Turned, ...]
    left: tuple[tuple[str, str], ...]
    ms_original: float
    ms_torchweft: float

    @property
    def gain(self) -> float:
        """How many times as fast the converted model is."""
        return self.ms_original / self.ms_torchweft

    def __str__(self) -> str:
        head = ("", "largest", "difference", "relative", "error, original", "error, torchweft")
        rows = [
            (c.name, *(f"{value:.3g}" for value in (c.largest, c.difference, c.relative)),
             f"{c.error_original:.3g}", f"{c.error_torchweft:.3g}")
            for c in self.comparisons
        ]  # fmt: skip
        columns = zip(head, *rows, strict=True)
        widths = [max(map(len, column)) for column in columns]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (head, *rows)
        ]
        times = (
            f"a call takes {self.ms_original:.3g} ms, converted {self.ms_torchweft:.3g} ms: "
            f"{self.gain:.2f} times as fast"
        )
        turned = _counted("turned", [module.original for module in self.turned])
        left = _counted("left", [kind for _, kind in self.left])
        return "\n".join([*table, times, turned, left])


def check(model: nn.Module, batch: Any) -> Report:
    """Compares a model with its conversion, on a structure of your own.

    Args:
        model: a model of MACE, NequIP, Allegro, SevenNet or e3nn; the `from_…` that fits converts a
            copy, and the model stays as it is.
        batch: the model's input: a dictionary or another object, or a tuple of arguments; its
            tensors are copied for each call.

    Returns:
        A report, which prints as a table, with differences of energy, forces and stress in the
        model's units, with the errors of both models against a copy of the original in float64;
        which modules were converted and which were not; and the time of a call.

    Raises:
        DTypeError: the model holds no module that can be converted, or returns no energy, forces or
            stress and no tensor.
        ShapeError: results of the model are not finite.

    Memory: three copies of the model, and one call in float64.  Time: the first calls, which
    compile, and five calls of each model.

    Example:
        >>> import torch
        >>> from e3nn.o3 import Linear
        >>> from torchweft import o3
        >>> report = o3.check(Linear("8x0e + 8x1o", "4x0e"), torch.randn(10, 32))
        >>> report.turned
        (Turned(name='', original='e3nn.Linear', torchweft='torchweft.Linear'),)
        >>> report.left
        ()
    """
    converted = _converter(model)(_copy(model))
    original = _copy(model)
    exact = _call(_doubled(model), batch, torch.float64)
    theirs = _call(original, batch)
    _check_finite(theirs, batch)
    ours = _call(converted, batch)
    times = _times_ms({"original": original, "torchweft": converted}, batch)
    return Report(
        comparisons=tuple(
            _comparison(name, theirs[name], ours[name], exact[name]) for name in theirs
        ),
        turned=tuple(_turned(original, converted)),
        left=tuple(_left(converted)),
        ms_original=times["original"],
        ms_torchweft=times["torchweft"],
    )


def _converter(model: nn.Module) -> Callable[[nn.Module], nn.Module]:
    """The function for the library whose layers the model holds."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    for (package, name), convert in _CONVERTERS.items():
        if any(is_of(package, name, module) for module in modules):
            return convert
    if not holds("e3nn", model):
        raise DTypeError(
            f"check was given a {type(model).__name__}: it must be, or hold, layers of e3nn, or be "
            "a model of MACE, NequIP, Allegro or SevenNet. Pass the model as its library made it, "
            "before a conversion."
        )
    return from_e3nn


def _copy(model: nn.Module) -> nn.Module:
    """A deep copy but for scripted functions, as SevenNet has some: these cannot be copied."""
    values = (value for module in model.modules() for value in vars(module).values())
    shared = {id(value): value for value in values if isinstance(value, torch.jit.ScriptFunction)}
    return copy.deepcopy(model, shared)


def _doubled(model: nn.Module) -> nn.Module:
    """A copy in float64, with the dtypes that its modules have written down."""
    doubled = _copy(model).double()
    for module in doubled.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.dtype) and value.is_floating_point:
                setattr(module, name, torch.float64)
    return doubled


def _call(model: nn.Module, batch: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Results of a copy of the batch; `dtype` is of its floating tensors, and the default one."""
    given = _copied(batch, dtype)
    asked = {"compute_stress": True} if _takes(model, "compute_stress") else {}
    with default_dtype(dtype or torch.get_default_dtype()):
        output = model(*given, **asked) if isinstance(given, tuple) else model(given, **asked)
    return _results(output)


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _copied(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with new tensors, so that a model may write into it, or set requires_grad."""
    if isinstance(batch, Tensor):
        kept = dtype is None or not batch.is_floating_point()
        copied = batch.detach().to(batch.dtype if kept else dtype, copy=True)
        return copied.requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return {key: _copied(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_copied(value, dtype) for value in batch)
    if hasattr(batch, "apply"):  # data of torch_geometric
        return copy.copy(batch).apply(lambda tensor: _copied(tensor, dtype))
    return batch


def _results(output: Any) -> dict[str, Tensor]:
    """Energy, forces and stress of what a model returned, or the tensor that it returned."""
    if isinstance(output, Tensor):
        return {"output": output.detach()}
    names = output.keys() if hasattr(output, "keys") else ()
    found = {
        result: output[name].detach()
        for result, choices in _RESULTS.items()
        for name in choices
        if name in names and isinstance(output[name], Tensor)
    }
    if not found:
        raise DTypeError(
            f"the model returned a {type(output).__name__} with {', '.join(names) or 'no names'}: "
            "check compares a tensor, or energy, forces and stress of a dictionary. Pass the model "
            "whose forward computes these."
        )
    return found


def _check_finite(results: Mapping[str, Tensor], batch: Any) -> None:
    wrong = [name for name, value in results.items() if not value.isfinite().all()]
    if wrong:
        raise ShapeError(
            f"the model's {' and '.join(wrong)} hold NaN or infinite numbers, which come from "
            f"{_not_finite(batch) or 'its own weights, or from atoms at one place'}: check "
            "compares numbers. Look for the step, or the structure, in which the first one arose."
        )


def _not_finite(batch: Any) -> str:
    """The first number of a batch that is not finite, as in "positions[0, 2] is nan"."""
    batch = {"the input": batch} if isinstance(batch, Tensor) else batch
    given = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    for name, value in given:
        if isinstance(value, Tensor) and not value.isfinite().all():
            place = (~value.isfinite()).nonzero()[0].tolist()
            return f"{name}{place} is {float(value[tuple(place)])}"
    return ""


def _comparison(name: str, original: Tensor, ours: Tensor, exact: Tensor) -> Comparison:
    def largest(value: Tensor) -> float:
        return float(value.abs().max()) if value.numel() else 0.0

    original, ours = original.double(), ours.double()
    return Comparison(
        name,
        largest(original),
        largest(ours - original),
        largest(original - exact),
        largest(ours - exact),
    )


def _turned(original: nn.Module, converted: nn.Module, name: str = "") -> Iterator[Turned]:
    """The outermost modules whose class is torchweft's now."""
    if _package(converted) == "torchweft" != _package(original):
        yield Turned(name, _kind(original), _kind(converted))
        return
    before = dict(original.named_children())
    for child, module in converted.named_children():
        if child in before:
            yield from _turned(before[child], module, f"{name}.{child}".lstrip("."))


def _left(module: nn.Module, name: str = "", *, within: bool = False) -> Iterator[tuple[str, str]]:
    """Modules of e3nn, and outside of torchweft's (`within`) those without children."""
    if _package(module) == "e3nn":
        yield name, _kind(module)
        return
    within = within or _package(module) == "torchweft"
    children = list(module.named_children())
    if not children and not within and not isinstance(module, _CONTAINERS):
        yield name, _kind(module)
    for child, inner in children:
        yield from _left(inner, f"{name}.{child}".lstrip("."), within=within)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _kind(module: nn.Module) -> str:
    """As in e3nn.Linear: the package, and the first class of the module that has a public name."""
    names = (base.__name__ for base in type(module).__mro__)
    return f"{_package(module)}.{next(n for n in names if not n.startswith('_'))}"


def _counted(what: str, kinds: list[str]) -> str:
    parts = (f"{count} {kind}" for kind, count in Counter(kinds).most_common())
    return f"{what}: {', '.join(parts) or 'nothing'}"


def _times_ms(models: Mapping[str, nn.Module], batch: Any) -> dict[str, float]:
    """The median of some calls of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(CALLS):
        for name, model in models.items():
            times[name].append(_call_ms(model, batch))
    return {name: statistics.median(spent) for name, spent in times.items()}


def _call_ms(model: nn.Module, batch: Any) -> float:
    _synchronize()
    begin = time.perf_counter()
    _call(model, batch)
    _synchronize()
    return 1e3 * (time.perf_counter() - begin)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
