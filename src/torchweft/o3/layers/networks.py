"""Networks of numbers, and functions scaled to second moment 1.

normalize2mom       c f(x),  c = <f(t)²>^(-1/2) over normal t
FullyConnectedNet   x_{k+1} = √v c f(x_k W_k / √(h_k v_k)),  the last layer without f

On Hopper the hidden layers of a float32 network with SiLU are one kernel, see `hidden_layers`.  In
other networks on a GPU a function of PRINTED is one kernel, with the factors before and behind it,
and so is each of its derivatives; torch's own takes up to a dozen for a second derivative.  Other
functions, and all on a CPU, are torch's: its loops over numbers need no compilation there.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.core.backend import check_torch_only
from torchweft.core.operators.operands import same_kind
from torchweft.core.operators.operator import on_gpu
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.hidden_layers.functions import hidden_layers, serves
from torchweft.o3.hidden_layers.source import HiddenLayers
from torchweft.o3.irreps.rotation import check_last
from torchweft.o3.pointwise import cached_rows, first_rows, serves_rows
from torchweft.o3.row_programs import activation_key

__all__ = [
    "PRINTED",
    "FullyConnectedNet",
    "Function",
    "between",
    "is_printed",
    "moment",
    "normalize2mom",
    "on_host",
]

Function = Callable[[Tensor], Tensor]
"""A function of each number by itself."""

PRINTED: dict[Any, str] = {
    functional.silu: "silu",
    nn.SiLU: "silu",
    torch.sigmoid: "sigmoid",
    functional.sigmoid: "sigmoid",
    nn.Sigmoid: "sigmoid",
    torch.tanh: "tanh",
    functional.tanh: "tanh",
    nn.Tanh: "tanh",
}
"""Functions, and classes of modules, that kernels compute on a GPU; torch computes all others."""

MOMENT_SAMPLES = 1_000_000
"""Normal numbers that a moment is estimated from; e3nn's, so that checkpoints agree."""

FACTOR_TOLERANCE = 1e-4
"""Factors this near to 1 are left out, as e3nn does."""


def moment(f: Function, n: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """<f(t)^n>, the mean over normal t: over the same million float64 numbers as e3nn's.

    Args:
        f: a function of each number.
        n: the power.
        dtype: in which f is evaluated; None: torch's default dtype.
        device: of the random numbers; None: torch's default device.

    Returns:
        A tensor without dimensions.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> bool((o3.moment(torch.square, 1, torch.float64) - 1).abs() < 0.01)
        True
    """
    device = torch.get_default_device() if device is None else device
    generator = torch.Generator(device).manual_seed(0)
    t = torch.randn(MOMENT_SAMPLES, generator=generator, dtype=torch.float64, device=device)
    return f(t.to(dtype or torch.get_default_dtype())).pow(n).mean()


def on_host(f: nn.Module) -> nn.Module:
    """A copy on the CPU, in float64."""
    return copy.deepcopy(f).to("cpu", torch.float64)


def _factor(f: Function) -> float:
    """<f(t)²>^(-1/2)."""
    with torch.no_grad():
        return float(moment(f, 2, torch.float64, "cpu").pow(-0.5))


_cached_factor = functools.lru_cache(maxsize=256)(_factor)


class normalize2mom(nn.Module):  # noqa: N801 - e3nn's name
    """c f(x), c = <f(t)²>^(-1/2) over the same million normal numbers as e3nn's.

    Args:
        f: a function of each number.
        dtype: without effect, as in e3nn: the mean is taken in float64.
        device: without effect: the random numbers are those of the CPU.
        backend: None or "torch".

    Attributes:
        f: the function.
        cst: c; 1.0 if c is that to 1e-4.
        printed: the name of f in kernels; None: torch computes it.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> f = o3.normalize2mom(torch.tanh)
        >>> round(f.cst, 6)
        1.593733
    """

    def __init__(
        self,
        f: Function,
        dtype: torch.dtype | None = None,
        device: Any = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_torch_only(self, backend)
        self.f = f
        kind = type(f) if isinstance(f, nn.Module) else f
        self.printed = None if backend == "torch" else PRINTED.get(kind)
        factor = _factor(on_host(f)) if isinstance(f, nn.Module) else _cached_factor(f)
        self.cst = 1.0 if abs(factor - 1) < FACTOR_TOLERANCE else factor

    def forward(self, x: Tensor) -> Tensor:
        """c f(x), in the shape of x."""
        if is_printed(self, x):
            return between(self, 1.0, x, self.cst)
        value = self.f(x)
        return value if self.cst == 1.0 else value * self.cst


def is_printed(act: normalize2mom, x: Tensor) -> bool:
    """Whether a kernel computes f of `act`, for tensors like x."""
    return act.printed is not None and x.dim() > 0 and serves_rows(x)


def between(act: normalize2mom, before: float, x: Tensor, after: float) -> Tensor:
    """after f(before x), in the shape of x, by one kernel; f is of `act`, and printed for x."""
    if not x.shape[-1]:
        return x
    called, x = (str(act.printed), before, after), x.contiguous()
    y = cached_rows(called, x)
    return (first_rows(called, activation_key(*called), x) if y is None else y)[0]


def _name_of(f: Function) -> str:
    return getattr(f, "__name__", type(f).__name__)


class _Layer(nn.Module):
    """√v_out c f(x W / √(h_in v_in)), or x W √v_out / √(h_in v_in) without f.

    Attributes:
        weight: W, (h_in, h_out).
        act: c f, or None.
        before: the factor of x W.
        after: √v_out c of a layer with f, else 1; numbers, so that no dtype rounds them.
    """

    def __init__(
        self, h_in: int, h_out: int, act: normalize2mom | None, var_in: float, var_out: float
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(h_in, h_out))
        self.act = act
        self.h_in, self.h_out, self.var_in, self.var_out = h_in, h_out, var_in, var_out
        root = math.sqrt(var_out)
        self.before = (root if act is None else 1.0) / math.sqrt(max(h_in, 1) * var_in)
        self.after = 1.0 if act is None else root * act.cst

    def __repr__(self) -> str:
        return f"Layer({self.h_in}->{self.h_out}, act={self.act and _name_of(self.act.f)})"

    def forward(self, x: Tensor) -> Tensor:
        """(…, h_out) of x (…, h_in)."""
        z, factor = self.between(self.before, x, self.after)
        return z if factor == 1.0 else z * factor

    def between(self, before: float, x: Tensor, after: float) -> tuple[Tensor, float]:
        """after f(before x W), but for the factor that is returned beside it.

        A kernel of f multiplies by both; else `before` is a factor of the matrix, the smallest
        tensor, and `after` is left to the next one.
        """
        x, weight = same_kind(x=x, weight=self.weight)
        if self.act is not None and is_printed(self.act, x):
            return between(self.act, before, x @ weight, after), 1.0
        z = x @ (weight if before == 1.0 else weight * before)
        return (z if self.act is None else self.act.f(z)), after


class FullyConnectedNet(nn.Sequential):
    """A multilayer perceptron: x_{k+1} = c f(x_k W_k / √h_k), and the last layer x W / √h.

    For normal x of variance 1 each layer's numbers have variance 1.

    Args:
        hs: widths of x, of the hidden layers, and of the result.
        act: f, a function of each number, scaled by c to second moment 1; None: linear.
        variance_in: variance of each number of x; the first matrix is divided by its root.
        variance_out: wanted variance of each number of the result, which is multiplied by its root.
        out_act: whether the last layer has f too.
        backend: see `torchweft.o3`.

    Attributes:
        layer0.weight, layer1.weight, …: the parameters (hs[0], hs[1]), …, as e3nn's.

    Raises:
        ShapeError: a negative width, or a variance that is not positive.
        DTypeError: a width that is no integer.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn; its checkpoints load.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> net = o3.FullyConnectedNet([8, 64, 64, 128], torch.nn.functional.silu)
        >>> net
        FullyConnectedNet[8, 64, 64, 128]
        >>> net(torch.randn(10, 8)).shape
        torch.Size([10, 128])
    """

    def __init__(
        self,
        hs: Iterable[int],
        act: Function | None = None,
        variance_in: float = 1,
        variance_out: float = 1,
        out_act: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_torch_only(self, backend)
        self.hs = _widths(hs)
        for name, variance in (("variance_in", variance_in), ("variance_out", variance_out)):
            if not variance > 0:
                raise ShapeError(
                    f"{name} is {variance!r}: a variance must be positive. Pass {name}=1."
                )
        f = None if act is None else normalize2mom(act, backend=backend)
        last = len(self.hs) - 2
        for n, (h_in, h_out) in enumerate(zip(self.hs, self.hs[1:], strict=False)):
            own = f if n < last or out_act else None
            var_in, var_out = (variance_in if n == 0 else 1), (variance_out if n == last else 1)
            self.add_module(f"layer{n}", _Layer(h_in, h_out, own, var_in, var_out))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.hs}"

    def forward(self, x: Tensor) -> Tensor:
        """The network's result.

        Args:
            x: (…, hs[0]).

        Returns:
            (…, hs[-1]) in x's dtype.
        """
        x, factor = self.hidden(x), 1.0
        for layer in self._layers()[-1:]:
            x, factor = layer.between(1.0, x, layer.after)
        return x if factor == 1.0 else x * factor

    def hidden(self, x: Tensor) -> Tensor:
        """(…, hs[-2]) of x (…, hs[0]): what the last matrix is applied to.

        `net.hidden(x) @ net.last_matrix()` is `net(x)`: the factor of the last matrix is in it.  So
        a convolution takes `radial=net.hidden(x), radial_weight=net.last_matrix()`.
        """
        check_last("x", x, self.hs[0])
        layers = self._layers()
        if on_gpu(x):
            weights, fused = [layer.weight for layer in layers[:-1]], self._fused(layers)
            if fused is not None and serves(fused, x, weights):
                return hidden_layers(fused, x, weights)
        factor = layers[0].before if layers else 1.0
        for layer, following in itertools.pairwise(layers):
            x, factor = layer.between(factor, x, layer.after * following.before)
        return x if factor == 1.0 else x * factor

    def last_matrix(self) -> Tensor:
        """(hs[-2], hs[-1]): the last matrix, which is a parameter, see `hidden`.

        Raises:
            ShapeError: there are no layers, or the last one has a function.
        """
        layers = self._layers()
        if not layers or layers[-1].act is not None:
            raise ShapeError(
                f"{self!r} ends {'with a function' if layers else 'without a layer'}: the last "
                "layer must be a matrix. Build it with two widths or more and out_act=False."
            )
        matrix: Tensor = layers[-1].weight
        return matrix

    def _fused(self, layers: list[Any]) -> HiddenLayers | None:
        """The layers but the last one, for a kernel of all; None: not all have SiLU."""
        if any(layer.act is None or layer.act.printed != "silu" for layer in layers[:-1]):
            return None
        after = [one.after * following.before for one, following in itertools.pairwise(layers)]
        return HiddenLayers(tuple(self.hs[:-1]), layers[0].before, tuple(after)) if after else None

    def _layers(self) -> list[Any]:
        return list(self.children())


def _widths(hs: Iterable[int]) -> list[int]:
    found = list(hs)
    for h in found:
        if not hasattr(h, "__index__"):
            raise DTypeError(
                f"hs is {found}: widths must be integers. Pass, for example, hs=[8, 64, 64, 128]."
            )
    if not found or min(found) < 0:
        raise ShapeError(
            f"hs is {found}: it must be one width or more, none negative. Pass, for example, "
            "hs=[8, 64, 64, 128]."
        )
    return found
