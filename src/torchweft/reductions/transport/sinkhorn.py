"""Distances between weighted clouds of points: kernel losses, optimal transport, `SamplesLoss`.

    loss(a, x, b, y) = ½ Σ a_i a_j k(x_i, x_j) + ½ Σ b_i b_j k(y_i, y_j) − Σ a_i b_j k(x_i, y_j)

with the kernel k of a name: energy −|x − y|, gaussian exp(−|x − y|² / 2 blur²), laplacian
exp(−|x − y| / blur).  Differentiable to any order in weights and points.  Weights may be of any
sign and mass; the energy is a distance where the masses of a and b agree.

Optimal transport, by Sinkhorn's iterations:

    OT_ε(a, x, b, y) = max Σ a_i f_i + Σ b_j g_j,
    f_i = −ε log Σ_j b_j exp((g_j − C(x_i, y_j)) / ε),   g_j alike,   C(x, y) = |x − y|^p / p
    loss = OT_ε(a, x, b, y) − ½ OT_ε(a, x, a, x) − ½ OT_ε(b, y, b, y)       (debiased)

ε falls from the diameter of the data to blur^p, by scaling^p at each step, and potentials are
averaged with their updates, so that f and g are treated alike.  Gradients are gradients of the dual
value with constant potentials (the envelope theorem): right to first order; second derivatives
raise.  `scaling` alone decides how near the potentials are to the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.engine.whole import together, whole
from torchweft.reductions.formula.node import Node, node, var
from torchweft.reductions.transport.multiscale import (
    Cloud,
    log_weights,
    multiscale,
    partners,
    softmin,
)

__all__ = ["LOSS_KERNELS", "SamplesLoss", "kernel_loss", "sinkhorn_divergence"]

BACKENDS = ("auto", "online", "multiscale")
LEAST_PAIRS_OF_CLUSTERS = 10_000**2


def _distance(x: Node, y: Node) -> Node:
    return node("sqrt", node("sqdist", x, y))


# points are in units of the blur
LOSS_KERNELS: dict[str, Callable[[Node, Node], Node]] = {
    "energy": lambda x, y: -_distance(x, y),
    "gaussian": lambda x, y: node("exp", -0.5 * node("sqdist", x, y)),
    "laplacian": lambda x, y: node("exp", -_distance(x, y)),
}


class SamplesLoss(nn.Module):
    """A distance between weighted clouds: loss(x, y) or loss(a, x, b, y).

    Args:
        loss: "sinkhorn", "energy", "gaussian" or "laplacian".
        p: exponent of the cost |x − y|^p / p, 1 or 2.  This, `scaling`, `debias` and `backend` are
            read by "sinkhorn" alone.
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
        names = ("sinkhorn", *LOSS_KERNELS)
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

    @together
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
        settings = self.loss, self.p, self.blur, self.scaling, self.debias, self.backend
        a, x, b, y = _weighted(args, settings)
        if self.loss in LOSS_KERNELS:
            return kernel_loss(self.loss, a, x, b, y, blur=self.blur)
        return sinkhorn_divergence(
            a, x, b, y, self.p, self.blur, self.scaling, self.debias, self.backend
        )


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

    Cost: about 4 log(diameter / blur) / log(1 / scaling) reductions over all pairs, or those of
    the clusters that meet.

    Raises:
        ShapeError: a shape does not fit, a cloud is empty, a weight is negative, masses differ, or
            points are not finite.  Weights and points are looked at on a GPU too, with the
            diameter, which the call waits for in any case.
        DTypeError: the points are not of one floating dtype.
    """
    _check_clouds(a, x, b, y)
    dtype, slack, clusters = x.dtype, _slack(a, b), _takes_clusters(backend, x, y)
    a, x, b, y = _widened(*map(_first_order, (a, x, b, y)))
    x, y, diagonal = _centred(x, y)
    lengths = _lengths(_diameter(a, b, diagonal, slack), blur, scaling)
    if clusters:
        a, b, last = multiscale(a, x, b, y, p, lengths, debias)
    else:
        last = _online(a, x, b, y, p, lengths, debias)
    f, g, *own = last
    total = (a * f).sum(-1) + (b * g).sum(-1)
    for weights, potential in zip((a, b), own, strict=False):
        total = total - (weights * potential).sum(-1)
    return whole().total(total).to(dtype)


def kernel_loss(
    name: str,
    a: Tensor,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    *,
    blur: float = 0.05,
    backend: str | None = None,
) -> Tensor:
    """½ ⟨a, K(x, x) a⟩ + ½ ⟨b, K(y, y) b⟩ − ⟨a, K(x, y) b⟩, (*batch)

    Args:
        name: of LOSS_KERNELS.
        a: (*batch, M) weights.
        x: (*batch, M, D) points.
        b: (*batch, N) weights.
        y: (*batch, N, D) points.
        blur: width of the kernel; the energy distance has none.
        backend: as `reduce` takes it.
    """
    _check_clouds(a, x, b, y)
    dtype, dim = x.dtype, x.shape[-1]
    a, x, b, y = _widened(a, x, b, y)
    x, y, _ = _centred(x, y)
    formula = LOSS_KERNELS[name](var(0, dim, 0), var(1, dim, 1)) * var(2, 1, 1)
    scale = 1.0 if name == "energy" else 1 / blur

    def mean(at: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        columns = (scale * at, scale * points, weights.unsqueeze(-1))
        result = reduce("Sum", formula, columns, 1, backend=backend)
        assert isinstance(result, Tensor)
        return result.squeeze(-1)

    own = 0.5 * (a * mean(x, x, a)).sum(-1) + 0.5 * (b * mean(y, y, b)).sum(-1)
    return whole().total(own - (a * mean(x, y, b)).sum(-1)).to(dtype)


def _check_clouds(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> None:
    """Raise unless they are weights (*batch, points) and points (*batch, points, D), some of each.

    Raises:
        DTypeError: one is no strided tensor, the points are not floating-point numbers, x and y of
            different ones, or the weights are computed in another dtype than the points.
        ShapeError: a shape does not fit, or a cloud has no points.
    """
    whole().agree("a loss of clouds", lambda: _checked(a, x, b, y))
    for name, points in (("x", x), ("y", y)):
        if not points.shape[-1] * whole().number(points.shape[-2]):
            raise ShapeError(
                f"{name} is {tuple(points.shape)}: a cloud must have at least one point, of one "
                "coordinate or more. Leave empty clouds out."
            )


def _checked(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> dict[str, Any]:
    """What the clouds of all processes share; raises as `_check_clouds` does."""
    check_tensors(a=a, x=x, b=b, y=y)
    if x.dtype != y.dtype or not x.is_floating_point():
        raise DTypeError(
            f"x is {x.dtype} and y {y.dtype}: points must be of one floating dtype. Convert them "
            "with .to(torch.float32)."
        )
    if min(x.ndim, y.ndim) < 2 or x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(
            f"x is {tuple(x.shape)} but y is {tuple(y.shape)}: both must be (*batch, points, D) "
            "with the same batch and D. Reshape one of them."
        )
    for name, weights, other, points in (("a", a, "x", x), ("b", b, "y", y)):
        own, common = (torch.promote_types(t.dtype, torch.float32) for t in (weights, points))
        if own != common:
            raise DTypeError(
                f"a loss of clouds is given weights {name} of {weights.dtype} at points {other} of "
                f"{points.dtype}: it computes in one dtype. Convert the weights with "
                f"{name}.to({points.dtype})."
            )
        if weights.shape != points.shape[:-1]:
            raise ShapeError(
                f"{name} is {tuple(weights.shape)} but its points are {tuple(points.shape)}: each "
                f"point has one weight. Pass {name} as {tuple(points.shape[:-1])}."
            )
    return {
        "batch": x.shape[:-2],
        "number of coordinates": x.shape[-1],
        "dtype": (a.dtype, x.dtype, b.dtype),
        "device": x.device.type,
        "requires_grad": [t.requires_grad for t in (a, x, b, y)],
    }


def _centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both clouds around the middle of their box, so that rounding sees no large coordinates.

    Returns:
        x, y and the length of the diagonal of the box, (*batch).
    """
    points = torch.cat([x.detach(), y.detach()], -2)
    if points.shape[-2]:
        low, high = points.amin(-2, keepdim=True), points.amax(-2, keepdim=True)
    else:  # of other processes
        low, high = (
            points.new_full((*points.shape[:-2], 1, 1), n) for n in (torch.inf, -torch.inf)
        )
        low, high = low.expand(*low.shape[:-1], points.shape[-1]), high.expand_as(low)
    low, high = -whole().largest(-low), whole().largest(high)
    middle = (low + high) / 2
    return x - middle, y - middle, (high - low).norm(dim=-1).squeeze(-1)


def _widened(*tensors: Tensor) -> list[Tensor]:
    """16-bit numbers in float32, so that results on the way are not rounded to 16 bits."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _weighted(
    args: tuple[Tensor, ...], settings: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(a, x, b, y)"""

    def describe() -> dict[str, Any]:
        _check_args(args)
        return {"number of tensors": len(args), "settings": settings}

    whole().agree("SamplesLoss", describe)
    if len(args) == 4:
        return args
    x, y = args
    # widened: rounded to 16 bits, 1 / M and 1 / N make masses that differ
    counts = (max(1, whole().number(z.shape[-2:-1].numel())) for z in args)
    a, b = (z.new_full(z.shape[:-1], 1 / n) for z, n in zip(_widened(x, y), counts, strict=True))
    return a, x, b, y


def _check_args(args: tuple[Tensor, ...]) -> None:
    if len(args) not in (2, 4):
        raise ShapeError(
            f"{len(args)} tensors are given: x and y, or a, x, b and y are needed. Pass two "
            "clouds, or two clouds with their weights in front."
        )
    names = ("x", "y") if len(args) == 2 else ("a", "x", "b", "y")
    check_tensors(**dict(zip(names, args, strict=True)))


def _slack(*weights: Tensor) -> float:
    """Tolerance of masses: half of the weights' digits, at most those of float32."""
    dtypes = [torch.float32, *(w.dtype for w in weights if w.is_floating_point())]
    return math.sqrt(max(torch.finfo(dtype).eps for dtype in dtypes))


def _diameter(a: Tensor, b: Tensor, diagonal: Tensor, slack: float) -> float:
    """The largest diagonal; raises unless a and b are measures of one mass.

    All numbers come in one copy, the only one that the online backend waits for.
    """
    if not diagonal.numel():
        return 0.0  # a batch of nothing
    with torch.no_grad():
        masses = whole().total(torch.stack([a.sum(-1), b.sum(-1)]))
        low, high = masses.aminmax(dim=0)
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
    if whole().spread:
        if backend == "multiscale":
            raise BackendError(
                "multiscale transport is asked for in all_pairs: its clusters are those of one "
                "process. Pass backend='online'."
            )
        return False
    possible = x.ndim == 2 and x.shape[-1] <= 3
    if backend == "multiscale" and not possible:
        raise BackendError(
            f"x is {tuple(x.shape)}: multiscale needs one cloud (M, D) with D ≤ 3, for its "
            "clusters. Pass backend='online'."
        )
    large = x.shape[-2] * y.shape[-2] > LEAST_PAIRS_OF_CLUSTERS
    return backend == "multiscale" or (backend == "auto" and possible and large)


def _online(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, p: int, lengths: list[float], debias: bool
) -> list[Tensor]:
    """The potentials at the end, as functions of x and y alone."""
    clouds = [Cloud(x, log_weights(a)), Cloud(y, log_weights(b))] * (2 if debias else 1)
    seen = partners(len(clouds))
    potentials = [torch.zeros_like(cloud.log_weights[..., 0]) for cloud in clouds]
    sources = [clouds[k] for k in seen]
    alike = x.shape == y.shape and not whole().spread
    if alike:  # a batch: fewer and larger reductions
        clouds, sources = [_batch(clouds)], [_batch(sources)]

    def updated(length: float, potentials: list[Tensor]) -> list[Tensor]:
        others = [potentials[k] for k in seen]
        others = [torch.stack(others)] if alike else others
        pairs = zip(clouds, sources, others, strict=True)
        found = [softmin(p, length, at.points, source, g) for at, source, g in pairs]
        return [*found[0].unbind(0)] if alike else found

    with torch.no_grad():
        potentials = updated(lengths[0], potentials)
        for length in lengths:
            new = updated(length, potentials)
            potentials = [(one + other) / 2 for one, other in zip(potentials, new, strict=True)]
    return updated(lengths[-1], potentials)


def _batch(clouds: list[Cloud]) -> Cloud:
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
