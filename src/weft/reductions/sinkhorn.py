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

from weft.errors import BackendError, ShapeError
from weft.reductions.bricks import partners
from weft.reductions.losses import KERNELS, centred, kernel_loss, widened
from weft.reductions.multiscale import multiscale
from weft.reductions.softmin import Cloud, log_weights, softmin

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
                (*batch, M), x, b (*batch, N) and y.
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
    """
    dtype = x.dtype
    a, x, b, y = widened(*map(_first_order, (a, x, b, y)))
    x, y, diagonal = centred(x, y)
    lengths = _lengths(float(diagonal.max()), blur, scaling)
    if _takes_clusters(backend, x, y):
        a, b, last = multiscale(a, x, b, y, p, lengths, debias)
    else:
        last = _online(a, x, b, y, p, lengths, debias)
    f, g, *own = last
    total = (a * f).sum(-1) + (b * g).sum(-1)
    for weights, potential in zip((a, b), own, strict=False):
        total = total - (weights * potential).sum(-1)
    return total.to(dtype)


def _weighted(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, x, b, y), checked."""
    if len(args) not in (2, 4):
        raise ShapeError(
            f"{len(args)} tensors are given: x and y, or a, x, b and y are needed. Pass two "
            "clouds, or two clouds with their weights in front."
        )
    x, y = args if len(args) == 2 else args[1::2]
    if min(x.ndim, y.ndim) < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(
            f"x is {tuple(x.shape)} but y is {tuple(y.shape)}: both must be (*batch, points, D) "
            "with the same batch and D. Reshape one of them."
        )
    if len(args) == 4:
        a, b = args[::2]
    else:
        a, b = (t.new_full(t.shape[:-1], 1 / max(1, t.shape[-2])) for t in (x, y))
    for name, weights, points in (("a", a, x), ("b", b, y)):
        if weights.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(weights.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one weight. Pass {name} as {tuple(points.shape[:-1])}."
            )
    return a, x, b, y


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
