"""Optimal transport between clouds by Sinkhorn's iterations, and `SamplesLoss` over all losses.

    OT_ε(a, x, b, y) = max Σ a_i f_i + Σ b_j g_j,
    f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   g_j alike,   C(x, y) = |x − y|^p / p
    loss = OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y)       (debiased)

ε falls from the diameter of the data to blur^p, by scaling^p at each step, and potentials are
averaged with their updates, so that f and g are treated alike.  Gradients are those of the dual
value with the potentials held (the envelope theorem): right to first order, and second derivatives
raise.  How near the potentials are to the maximum is decided by `scaling` alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.errors import BackendError, ShapeError
from torchweft.reductions.cluster.bricks import partners
from torchweft.reductions.transport.losses import (
    KERNELS,
    centred,
    check_clouds,
    kernel_loss,
    widened,
)
from torchweft.reductions.transport.multiscale import multiscale
from torchweft.reductions.transport.softmin import Cloud, log_weights, softmin

__all__ = ["SamplesLoss", "sinkhorn_divergence"]

BACKENDS = ("auto", "online", "multiscale")
LARGE = 10_000**2  # pairs: beyond them clusters pay for themselves


class SamplesLoss(nn.Module):
    """A distance between weighted clouds: loss(x, y) or loss(a, x, b, y).

    Args:
        loss: "sinkhorn", "energy", "gaussian" or "laplacian".
        p: of the cost |x − y|^p / p, 1 or 2; of "sinkhorn" alone, as are those below but blur.
        blur: the length below which details do not count: the temperature is blur^p, the width of
            the kernels blur.
        scaling: what lengths shrink by from a step to the next, between 0 and 1; nearer 1 is
            slower and nearer the maximum.
        debias: whether the loss of a cloud and itself is taken off, so that it is 0.
        backend: "online" looks at all pairs at each step.  "multiscale" goes through clusters and
            then leaves out pairs whose plan is below e^−8 of a_i b_j, so that an update is off by
            −blur^p log(1 − e^−8) at most; D ≤ 3, no batch.  "auto" takes it from 10⁸ pairs on.
    """

    def __init__(
        self,
        loss: str = "sinkhorn",
        p: int = 2,
        blur: float = 0.05,
        scaling: float = 0.5,
        debias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        names = ("sinkhorn", *KERNELS)
        for name, value, choices in (
            ("loss", loss, names),
            ("p", p, (1, 2)),
            ("backend", backend, BACKENDS),
        ):
            if value not in choices:
                listed = ", ".join(map(repr, choices))
                raise ShapeError(f"{name} is {value!r}: it must be one of {listed}. Pass one.")
        if not (blur > 0 and 0 < scaling < 1):
            raise ShapeError(
                f"blur is {blur} and scaling {scaling}: blur must be positive, scaling between 0 "
                "and 1. Pass a length of the data, and 0.5, say."
            )
        self.loss, self.p, self.blur, self.scaling = loss, p, blur, scaling
        self.debias, self.backend = debias, backend

    def forward(self, *args: Tensor) -> Tensor:
        """The loss, (*batch).

        Args:
            args: x (*batch, M, D) and y (*batch, N, D) with weights 1 / M and 1 / N; or a
                (*batch, M), x, b (*batch, N) and y.  For "sinkhorn" weights are 0 or more, and
                the masses Σ a and Σ b agree to half of their digits; other losses take any.

        Raises:
            ShapeError: that does not hold, a shape does not fit, or a cloud is empty.
            DTypeError: the points are not of one floating dtype.
        """
        a, x, b, y = _weighted(args)
        if self.loss in KERNELS:
            return kernel_loss(self.loss, a, x, b, y, blur=self.blur)
        return sinkhorn_divergence(
            a, x, b, y, self.p, self.blur, self.scaling, self.debias, self.backend
        )


def sinkhorn_divergence(
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    p: int = 2,
    blur: float = 0.05,
    scaling: float = 0.5,
    debias: bool = True,
    backend: str = "auto",
) -> Tensor:
    """OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y), (*batch); see `SamplesLoss`.

    Cost: about 4 log(diameter / blur) / log(1 / scaling) reductions over all pairs, or those of
    the clusters that meet.

    Raises:
        ShapeError: a shape does not fit, a cloud is empty, a weight is negative, masses differ, or
            points are not finite.  Weights and points are looked at on a GPU too, with the
            diameter, which the call waits for in any case.
        DTypeError: the points are not of one floating dtype.
    """
    check_clouds(a, x, b, y)
    dtype, slack, clusters = x.dtype, _slack(a, b), _takes_clusters(backend, x, y)
    a, x, b, y = widened(*map(_first_order, (a, x, b, y)))
    x, y, diagonal = centred(x, y)
    lengths = _lengths(_diameter(a, b, diagonal, slack), blur, scaling)
    if clusters:
        a, b, last = multiscale(a, x, b, y, p, lengths, debias)
    else:
        last = _online(a, x, b, y, p, lengths, debias)
    f, g, *own = last
    total = (a * f).sum(-1) + (b * g).sum(-1)
    for weights, potential in zip((a, b), own, strict=False):
        total = total - (weights * potential).sum(-1)
    return total.to(dtype)


def _weighted(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, x, b, y)"""
    if len(args) not in (2, 4):
        raise ShapeError(
            f"{len(args)} tensors are given: x and y, or a, x, b and y are needed. Pass two "
            "clouds, or two clouds with their weights in front."
        )
    if len(args) == 4:
        return args
    x, y = args
    # widened: rounded to 16 bits, 1 / M and 1 / N make masses that differ
    counts = (max(1, z.shape[-2:-1].numel()) for z in args)
    a, b = (z.new_full(z.shape[:-1], 1 / n) for z, n in zip(widened(x, y), counts, strict=True))
    return a, x, b, y


def _slack(*weights: Tensor) -> float:
    """Half of the digits that weights have, those of float32 at most: the rest is rounding."""
    dtypes = [torch.float32, *(w.dtype for w in weights if w.is_floating_point())]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))


def _diameter(a: Tensor, b: Tensor, diagonal: Tensor, slack: float) -> float:
    """The largest diagonal; raises unless a and b are measures of one mass.

    All numbers come in one copy, the only one that the online backend waits for.
    """
    if not diagonal.numel():
        return 0.0  # a batch of nothing
    with torch.no_grad():
        masses = torch.stack([a.sum(-1), b.sum(-1)])
        low, high = masses.aminmax(dim=0)
        facts = diagonal.max(), torch.cat([a, b], -1).min(), (low / high).min()
        diameter, least, agreement = torch.stack(facts).tolist()
    if not math.isfinite(diameter):
        raise ShapeError(
            f"the clouds are {diameter} across: points and their distances must be finite. Look "
            "for others with torch.isfinite, or scale the points down."
        )
    if not least >= 0:  # nor nan
        name = "b" if a.min() >= 0 else "a"
        raise ShapeError(
            f"{name} holds a weight of {least:g}: the weights of transport must be 0 or more. Make "
            "them so, or use loss='gaussian' or 'laplacian', which take any."
        )
    if not agreement >= 1 - slack:  # nan for 0 / 0
        worst = (low / high).nan_to_num(-1).argmin()
        of_a, of_b = masses.view(2, -1)[:, worst].tolist()
        raise ShapeError(
            f"the mass of a is {of_a:g} and that of b {of_b:g}: transport needs equal ones, above "
            "0. Divide each by its own, such as a / a.sum(-1, keepdim=True)."
        )
    return float(diameter)


def _lengths(diameter: float, blur: float, scaling: float) -> list[float]:
    """From the diameter on, lengths that shrink by `scaling`, then the blur."""
    steps = math.ceil(math.log(blur / max(diameter, blur)) / math.log(scaling) - 1e-9)
    return [*(diameter * scaling**n for n in range(steps)), blur]


def _takes_clusters(backend: str, x: Tensor, y: Tensor) -> bool:
    possible = x.ndim == 2 and x.shape[-1] <= 3
    if backend == "multiscale" and not possible:
        raise BackendError(
            f"x is {tuple(x.shape)}: multiscale needs one cloud (M, D) with D ≤ 3, for its "
            "clusters. Pass backend='online'."
        )
    large = x.shape[-2] * y.shape[-2] > LARGE
    return backend == "multiscale" or (backend == "auto" and possible and large)


def _online(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, p: int, lengths: list[float], debias: bool
) -> list[Tensor]:
    """The potentials at the end, as functions of x and y alone."""
    clouds = [Cloud(x, log_weights(a)), Cloud(y, log_weights(b))] * (2 if debias else 1)
    seen = partners(len(clouds))
    potentials = [torch.zeros_like(cloud.log_weights[..., 0]) for cloud in clouds]
    sources = [clouds[k] for k in seen]
    together = x.shape == y.shape  # a batch: fewer and larger reductions
    if together:
        clouds, sources = [_batch(clouds)], [_batch(sources)]

    def updated(length: float, potentials: list[Tensor]) -> list[Tensor]:
        others = [potentials[k] for k in seen]
        others = [torch.stack(others)] if together else others
        pairs = zip(clouds, sources, others, strict=True)
        found = [softmin(p, length, at.points, source, g) for at, source, g in pairs]
        return [*found[0].unbind(0)] if together else found

    with torch.no_grad():
        potentials = updated(lengths[0], potentials)
        for length in lengths:
            new = updated(length, potentials)
            potentials = [(one + other) / 2 for one, other in zip(potentials, new, strict=True)]
    return updated(lengths[-1], potentials)


def _batch(clouds: list[Cloud]) -> Cloud:
    return Cloud(*map(torch.stack, zip(*clouds, strict=True)))


class _Held(torch.autograd.Function):
    """x; its gradient cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        held: Tensor = _Refusal.apply(grads[0])  # type: ignore[no-untyped-call]
        return held


class _Refusal(_Held):
    """x; it cannot be differentiated."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise BackendError(
            "the gradient of a Sinkhorn loss is asked for its own gradient: it holds the "
            "potentials, so only first derivatives are right. Use loss='energy', 'gaussian' or "
            "'laplacian' for second ones, or detach the gradient."
        )


def _first_order(x: Tensor) -> Tensor:
    held: Tensor = _Held.apply(x)  # type: ignore[no-untyped-call]
    return held
