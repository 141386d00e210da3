"""Optimal transport between weighted clouds, by Sinkhorn's iterations.

    OT_ε(a, x, b, y) = max Σ a_i f_i + Σ b_j g_j,
    f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   g_j alike,   C(x, y) = |x − y|^p / p
    loss = OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y)       (debiased)

Unbalanced, masses may be made and lost at the price ρ = reach^p: with λ = 1 / (1 + ε / ρ),

    f_i = −λ ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),
    OT_ερ(a, x, b, y) = (ρ + ε / 2) (Σ a_i (1 − exp(−f_i / ρ)) + Σ b_j (1 − exp(−g_j / ρ)))

which lacks a constant of the masses, ε m_a m_b − ½ ε (m_a + m_b), that the debiased loss is free of
(Séjourné, Feydy, Vialard, Trouvé, Peyré: Sinkhorn divergences for unbalanced optimal transport,
arXiv:1910.12958, proposition 12).

ε falls from the diameter of the data to blur^p, by scaling^p at each step, and potentials are
averaged with their updates, so that f and g are treated alike (Feydy: Geometric data analysis,
beyond convolutions, 2020, section 3.3).  Gradients are those of the dual value at its maximum, in
which potentials are constants: right to first order; second derivatives raise.  `scaling` alone
decides how near the potentials are to the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_unmapped
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.reductions.engine.whole import together, whole
from torchweft.reductions.transport.clouds import centred, check_clouds, widened
from torchweft.reductions.transport.multiscale import multiscale, partners
from torchweft.reductions.transport.settings import Settings
from torchweft.reductions.transport.softmin import Cloud, Step, log_weights, softmin, step_of

__all__ = ["divergence", "dual_potentials", "sinkhorn_divergence"]

LEAST_PAIRS_OF_CLUSTERS = 10_000**2

Labels = tuple[Tensor | None, Tensor | None]


@together
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

    Args:
        a: (*batch, M) weights of x, 0 or more.
        x: (*batch, M, D) points.
        b: (*batch, N) weights of y, 0 or more, whose sum is that of a.
        y: (*batch, N, D) points, in the dtype of x.
        p: exponent of the cost |x − y|^p / p, 1 or 2.
        blur: the length below which details do not count; the temperature is ε = blur^p.
        scaling: what lengths shrink by from a step to the next, between 0 and 1.
        debias: whether the last two terms are taken off.
        backend: "online", "tensorized", "multiscale" or "auto".

    Returns:
        (*batch) in the dtype of x; differentiable once in all arguments.

    Cost: about 4 log(diameter / blur) / log(1 / scaling) reductions over all pairs, or those of
    the clusters that meet.

    Raises:
        ShapeError: a shape does not fit, a cloud is empty, a weight is negative, masses differ, or
            points are not finite.  Weights and points are looked at on a GPU too, with the
            diameter, which the call waits for in any case.
        DTypeError: the points are not of one floating dtype.

    Example:
        >>> import torch
        >>> from torchweft.reductions import sinkhorn_divergence
        >>> x, weights = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0.5, 0.5])
        >>> y = x + torch.tensor([0.3, 0.4])
        >>> round(float(sinkhorn_divergence(weights, x, weights, y, blur=0.01)), 3)
        0.125
    """
    given = Settings(p=p, blur=blur, scaling=scaling, debias=debias, backend=backend)
    return divergence(a, x, b, y, given.checked())


def divergence(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, settings: Settings, labels: Labels = (None, None)
) -> Tensor:
    """The loss, (*batch); `labels` (M,) and (N,) are the clusters of multiscale transport."""
    dual = _solved(a, x, b, y, settings, labels)
    return whole().total(_value(dual, settings)).to(x.dtype)


def dual_potentials(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, settings: Settings, labels: Labels = (None, None)
) -> tuple[Tensor, Tensor]:
    """f (*batch, M) and g (*batch, N); debiased, less those of x and of y against themselves.

    Each is a function of its own point: its gradient takes the measures as constants.
    """
    f, g, *own = _solved(a, x, b, y, settings, labels).potentials
    if own:
        f, g = f - own[0], g - own[1]
    return f.to(x.dtype), g.to(x.dtype)


class _Dual(NamedTuple):
    """Weights a and b, and potentials: f, g and, debiased, those of x and of y with themselves."""

    weights: tuple[Tensor, Tensor]
    potentials: list[Tensor]


def _solved(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, settings: Settings, labels: Labels
) -> _Dual:
    """The iterations' end; potentials are functions of the points alone."""
    check_clouds(a, x, b, y)
    check_unmapped("Pass clouds as a batch, (batch, points, D).", x=x, y=y, a=a, b=b)
    slack = None if settings.reach else _slack(a, b)
    clusters = _takes_clusters(settings, x, y, labels)
    a, x, b, y = widened(*map(_first_order, (a, x, b, y)))
    middle_x, middle_y, diagonal = centred(x, y)
    if settings.cost is None:  # which depends on differences alone
        x, y = middle_x, middle_y
    diameter = _diameter(a, b, diagonal, slack)
    lengths = settings.lengths(settings.diameter or diameter)
    if clusters:
        flat = ((w.flatten(), z.flatten(0, -2)) for w, z in ((a, x), (b, y)))
        clouds = [(*cloud, of) for cloud, of in zip(flat, labels, strict=True)]
        shapes = [a.shape, b.shape] * 2
        found = multiscale(clouds, lengths, settings)
        potentials = [f.view(shape) for f, shape in zip(found, shapes, strict=False)]
    else:
        potentials = _online(a, x, b, y, lengths, settings)
    return _Dual((a, b), potentials)


def _value(dual: _Dual, settings: Settings) -> Tensor:
    """The dual value of potentials at their maximum, with its gradient there."""
    terms = zip(dual.weights * 2, dual.potentials, (1, 1, -1, -1), strict=False)
    if settings.reach is None:
        return _signed((sign, (w * f).sum(-1)) for w, f, sign in terms)
    rho, eps = settings.reach**settings.p, settings.blur**settings.p
    total = _signed((sign, (w * -(-f / rho).expm1()).sum(-1)) for w, f, sign in terms)
    # the mass of the plan, which the potentials' equations say, is a constant to first order
    held = total.detach()
    if not settings.debias:
        mass = dual.weights[0].sum(-1) + dual.weights[1].sum(-1)
        held = held + mass - mass.detach()
    return (rho + eps) * total - eps / 2 * held


def _signed(terms: Any) -> Tensor:
    total: Tensor = sum(sign * term for sign, term in terms)
    return total


def _slack(*weights: Tensor) -> float:
    """Tolerance of masses: half of the weights' digits, at most those of float32."""
    dtypes = [torch.float32, *(w.dtype for w in weights if w.is_floating_point())]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))


def _diameter(a: Tensor, b: Tensor, diagonal: Tensor, slack: float | None) -> float:
    """The largest diagonal; raises unless a and b are measures, of one mass up to `slack`.

    All numbers come in one copy, the only one that the online backend waits for.
    """
    if not diagonal.numel():
        return 0.0  # a batch of nothing
    with torch.no_grad():
        masses = whole().total(torch.stack([a.sum(-1), b.sum(-1)]))
        # without slack: each against itself, so that 0, ∞ and nan are seen
        low, high = (masses, masses) if slack is None else masses.aminmax(dim=0)
        least_here = torch.cat([a, b, torch.ones_like(masses[0].unsqueeze(-1))], -1).min()
        facts = diagonal.max(), -whole().largest(-least_here), (low / high).min()
        diameter, least, agreement = torch.stack(facts).tolist()
    if not math.isfinite(diameter):
        raise ShapeError(
            f"the clouds are {diameter} across: points and their distances must be finite. Look "
            "for others with torch.isfinite, or scale the points down."
        )
    if not least >= 0:  # nor nan
        name = "b" if (a >= 0).all() else "a"
        raise ShapeError(
            f"{name} holds a weight of {least:g}: the weights of transport must be 0 or more. Make "
            "them so, or use loss='gaussian' or 'laplacian', which take any."
        )
    if not agreement >= 1 - (slack or 0):  # nan for 0 / 0
        raise _masses_apart(masses, (low / high).nan_to_num(-1), slack is None)
    return float(diameter)


def _masses_apart(masses: Tensor, agreement: Tensor, unbalanced: bool) -> ShapeError:
    """The error of the masses (2, *batch) that agree least."""
    masses = masses.view(2, -1)
    of_a, of_b = masses[:, agreement.argmin() % masses.shape[1]].tolist()
    if unbalanced:
        return ShapeError(
            f"the mass of a is {of_a:g} and that of b {of_b:g}: unbalanced transport needs finite "
            "ones, above 0. Leave out clouds whose weights are all 0."
        )
    return ShapeError(
        f"the mass of a is {of_a:g} and that of b {of_b:g}: transport needs equal ones, above 0. "
        "Divide each by its own, such as a / a.sum(-1, keepdim=True), or pass reach=, which lets "
        "masses differ."
    )


def _takes_clusters(settings: Settings, x: Tensor, y: Tensor, labels: Labels) -> bool:
    """Whether transport goes through clusters; raises where it was asked for and cannot."""
    labelled = _check_labels(labels, x, y)
    backend, one = settings.backend, x.shape[:-2].numel() == 1
    asked = backend == "multiscale" or labelled
    if whole().spread:
        if asked:
            raise BackendError(
                "multiscale transport is asked for in all_pairs: its clusters are those of one "
                "process. Pass backend='online', and no labels."
            )
        return False
    if labelled and (backend not in ("auto", "multiscale") or settings.cost is not None):
        raise BackendError(
            f"labels are given to backend={backend!r} and cost={settings.cost!r}: clusters are "
            "read by multiscale transport of |x − y|^p / p. Pass backend='multiscale' and no cost, "
            "or leave the labels out."
        )
    possible = one and (labelled or x.shape[-1] <= 3)
    if asked and not possible:
        raise BackendError(
            f"x is {tuple(x.shape)}: multiscale needs one cloud (M, D) with D ≤ 3, for its "
            "clusters, or labels of yours in any D. Pass backend='online'."
        )
    large = x.shape[-2] * y.shape[-2] > LEAST_PAIRS_OF_CLUSTERS
    return asked or (backend == "auto" and settings.cost is None and possible and large)


def _check_labels(labels: Labels, x: Tensor, y: Tensor) -> bool:
    """Whether there are labels; raises unless they are integers for all points of both clouds."""
    if labels[0] is None and labels[1] is None:
        return False
    for name, found, points in (("l_x", labels[0], x), ("l_y", labels[1], y)):
        if not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex():
            given = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise DTypeError(
                f"{name} is {given}: labels must be integers, for x and for y. Pass a tensor of "
                "the cluster of each point, such as cluster.grid_cluster(x, size)."
            )
        if found.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(found.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one label. Pass {name} as {tuple(points.shape[:-1])}."
            )
    return True


def _online(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, lengths: list[float], settings: Settings
) -> list[Tensor]:
    """The potentials at the end, as functions of x and y alone."""
    clouds = [Cloud(x, log_weights(a)), Cloud(y, log_weights(b))] * (2 if settings.debias else 1)
    seen = partners(len(clouds))
    potentials = [torch.zeros_like(cloud.log_weights[..., 0]) for cloud in clouds]
    sources = [clouds[k] for k in seen]
    alike = x.shape == y.shape and settings.cost is None and not whole().spread
    if alike:  # a batch: fewer and larger reductions
        clouds, sources = [_batch(clouds)], [_batch(sources)]
    steps = [_step(settings, at.points, of) for at, of in zip(clouds, sources, strict=True)]

    def updated(length: float, potentials: list[Tensor]) -> list[Tensor]:
        others = [potentials[k] for k in seen]
        others = [torch.stack(others)] if alike else others
        damping = settings.damping(length)
        found = [damping * step(length, g) for step, g in zip(steps, others, strict=True)]
        return [*found[0].unbind(0)] if alike else found

    with torch.no_grad():
        potentials = updated(lengths[0], potentials)
        for length in lengths:
            new = updated(length, potentials)
            potentials = [(one + other) / 2 for one, other in zip(potentials, new, strict=True)]
    return updated(lengths[-1], potentials)


def _step(settings: Settings, x: Tensor, source: Cloud) -> Step:
    if settings.cost is not None:
        return step_of(settings.cost, not settings.makes_matrix, settings.p, x, source)
    return lambda length, potential: softmin(settings.p, length, x, source, potential)


def _batch(clouds: Sequence[Cloud]) -> Cloud:
    return Cloud(*map(torch.stack, zip(*clouds, strict=True)))


class _FirstOrder(torch.autograd.Function):
    """x, whose gradient cannot be differentiated: `order` is that of the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: int) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.order = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.order:
            raise BackendError(
                "the gradient of a Sinkhorn loss is asked for its own gradient: it holds the "
                "potentials, so only first derivatives are right. Use loss='energy', 'gaussian' or "
                "'laplacian' for second ones, or detach the gradient."
            )
        return _first_order(grads[0], 1), None


def _first_order(x: Tensor, order: int = 0) -> Tensor:
    held: Tensor = _FirstOrder.apply(x, order)  # type: ignore[no-untyped-call]
    return held
