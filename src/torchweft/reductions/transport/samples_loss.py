"""`SamplesLoss`: distances between weighted clouds of points, with geomloss' arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import BackendError, ShapeError
from torchweft.reductions.engine.whole import together, whole
from torchweft.reductions.transport.clouds import widened
from torchweft.reductions.transport.kernel_losses import (
    LOSS_KERNELS,
    kernel_loss,
    kernel_potentials,
)
from torchweft.reductions.transport.settings import Settings, require_choice
from torchweft.reductions.transport.sinkhorn import divergence, dual_potentials

__all__ = ["SamplesLoss"]

NAMES = {2: ("x", "y"), 4: ("a", "x", "b", "y"), 6: ("l_x", "a", "x", "l_y", "b", "y")}


class SamplesLoss(nn.Module):
    """A distance between weighted clouds: loss(x, y) or loss(a, x, b, y).

    Names, order and meaning of the arguments are those of `geomloss.SamplesLoss`, and so are the
    numbers, to rounding, as long as the diameter is above the blur.

    Args:
        loss: "sinkhorn", "energy", "gaussian", "laplacian"; "hausdorff" is the loss of the `kernel`
            that is given with it.
        p: exponent of the cost |x − y|^p / p, 1 or 2; with another cost any positive number.  The
            temperature is ε = blur^p.  This, `reach`, `diameter`, `scaling`, `truncate`, `cost`,
            `cluster_scale`, `debias` and `verbose` are read by "sinkhorn" alone.
        blur: the length below which details do not count, of temperatures and kernels.
        reach: the length beyond which mass is rather made and lost than carried: ρ = reach^p is the
            weight of KL(marginal of the plan, weights).  None: masses agree and are kept.
        diameter: the length that steps begin with; None: the diagonal of the box around x and y,
            the largest of a batch.
        scaling: what lengths shrink by from a step to the next, between 0 and 1; nearer 1 is
            slower and nearer the maximum.  At a blur of 0.05 in the unit cube the default is 4 %
            off the converged loss, 0.9 is 1 % and 0.99 0.1 %; docs/families/reductions.md has a
            table.
        truncate: multiscale transport leaves out pairs whose plan is below e^−truncate of a_i b_j,
            so that an update is off by −ε log(1 − e^−truncate) at most; None leaves out none.
            (geomloss has 5, and looks at the plan between centroids.)
        cost: what replaces |x − y|^p / p, symmetric: a formula string of X and Y, such as
            "Norm2(X - Y)", or a function.  With backend "online" it is called with lazy tensors x
            and y and returns one; with "auto" and "tensorized", with tensors (B, M, D) and
            (B, N, D), and returns (B, M, N), whose memory it takes.
        kernel: what replaces the kernel of a loss but "sinkhorn", symmetric: a formula string of X
            and Y, or a function that is called as kernel(x, y, blur=…, use_keops=…, ranges=None)
            with (B, M, D) and (B, N, D) and returns (B, M, N); with backend "online", where
            use_keops is True, a lazy tensor.
        cluster_scale: about the edge of clusters, of which there are 4096 at most, of 64 points or
            more; None or 0: of as few points as this allows.
        debias: whether the loss of a cloud and itself is taken off, so that it is 0.
        potentials: whether, in place of the loss, calls return a pair (F, G) of the shapes of the
            weights: the dual potentials f at x and g at y, debiased less those of x and of y
            against themselves.  Each is differentiable in its own points, with the measures held.
        verbose: whether multiscale transport says what its clusters, its lengths and the pairs it
            keeps are, on the standard output; costs a copy from the GPU at each step.
        backend: "online" looks at all pairs at each step, and so does "tensorized", which geomloss
            has: they differ in what functions are called with.  "multiscale" goes through clusters
            and then leaves out pairs, see `truncate`; D ≤ 3 or labels, one cloud.  "auto" takes it
            from 10⁸ pairs on.  Kernel losses are sums over all pairs with each of them.

    Raises:
        ShapeError: an argument is none of these.
        BackendError: "multiscale" and a cost.

    Example:
        >>> import torch
        >>> from torchweft.reductions import SamplesLoss
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> round(float(SamplesLoss(blur=0.01)(x, x + torch.tensor([0.3, 0.4]))), 3)
        0.125
        >>> a, b = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 1.5])  # masses of 1 and 2
        >>> f, g = SamplesLoss(reach=0.5, debias=False, potentials=True)(a, x, b, x)
        >>> f.shape, g.shape
        (torch.Size([2]), torch.Size([2]))
    """

    def __init__(
        self,
        loss: str = "sinkhorn",
        p: int = 2,
        blur: float = 0.05,
        reach: float | None = None,
        diameter: float | None = None,
        scaling: float = 0.5,
        truncate: float | None = 8.0,
        cost: str | Callable[..., Any] | None = None,
        kernel: str | Callable[..., Any] | None = None,
        cluster_scale: float | None = None,
        debias: bool = True,
        potentials: bool = False,
        verbose: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.loss, self.p, self.blur, self.reach = loss, p, blur, reach
        self.diameter, self.scaling, self.truncate = diameter, scaling, truncate
        self.cost, self.kernel, self.cluster_scale = cost, kernel, cluster_scale
        self.debias, self.potentials = debias, potentials
        self.verbose, self.backend = verbose, backend
        self._settings()

    def _settings(self) -> Settings:
        """Checked when they are used: users assign attributes."""
        require_choice("loss", self.loss, ("sinkhorn", "hausdorff", *LOSS_KERNELS))
        if self.loss == "hausdorff" and self.kernel is None:
            raise ShapeError(
                "loss is 'hausdorff' and kernel None: geomloss has it for a kernel of yours alone. "
                "Pass kernel=, or one of the losses 'sinkhorn' and 'energy'."
            )
        unread = "kernel" if self.loss == "sinkhorn" else "cost"
        if getattr(self, unread) is not None:
            other = "cost" if self.loss == "sinkhorn" else "kernel"
            raise ShapeError(
                f"{unread} is given to loss={self.loss!r}, which does not read it: it takes a "
                f"{other}. Pass {other}=, or another loss."
            )
        return Settings(*(getattr(self, name) for name in Settings._fields)).checked()

    if TYPE_CHECKING:

        def __call__(self, *args: Tensor) -> Tensor:
            """The loss of `forward`; a pair is unpacked as a tensor is."""

    @together
    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The loss, (*batch); or the potentials, (*batch, M) and (*batch, N).

        Args:
            args: x (*batch, M, D) and y (*batch, N, D) with weights 1 / M and 1 / N; or a
                (*batch, M), x, b (*batch, N) and y; or l_x (M,), a, x, l_y (N,), b and y with
                integer labels of the clusters of multiscale transport, which other losses do not
                read.  A dimension of 1 may follow that of weights and labels.  For "sinkhorn"
                weights are 0 or more, and without `reach` the masses Σ a and Σ b agree to half of
                their digits; other losses take any.

        Raises:
            ShapeError: that does not hold, a shape does not fit, or a cloud is empty.
            DTypeError: the points are not of one floating dtype, or labels not integers.
            BackendError: multiscale transport or a function's matrix cannot serve here.
        """
        settings = self._settings()
        functions = [f for f in (self.cost, self.kernel) if callable(f)]
        named = settings._replace(cost=_name(self.cost)), self.loss, _name(self.kernel)

        def describe() -> dict[str, Any]:
            _check_args(args)
            if functions and whole().spread and self.backend != "online":
                raise BackendError(
                    f"{_name(functions[0])} is given to a loss in all_pairs, with backend="
                    f"{self.backend!r}: a matrix is of the rows of one process. Pass a formula "
                    "string, or a function of lazy tensors with backend='online'."
                )
            return {"number of tensors": len(args), "settings": (*named, self.potentials)}

        whole().agree("SamplesLoss", describe)
        l_x, a, x, l_y, b, y = _weighted(args)
        if self.loss == "sinkhorn":
            solve = dual_potentials if self.potentials else divergence
            return solve(a, x, b, y, settings, (l_x, l_y))
        kernel = self.loss if self.kernel is None else self.kernel
        lazily = self.backend == "online"
        of_kernel = kernel_potentials if self.potentials else kernel_loss
        return of_kernel(kernel, a, x, b, y, blur=self.blur, lazily=lazily)


def _name(given: str | Callable[..., Any] | None) -> str | None:
    """What all processes call a function, whose `repr` may hold an address."""
    if given is None or isinstance(given, str):
        return given
    return getattr(given, "__qualname__", type(given).__qualname__)


def _check_args(args: tuple[Any, ...]) -> None:
    if len(args) not in NAMES:
        raise ShapeError(
            f"{len(args)} tensors are given: x and y, or a, x, b and y, or l_x, a, x, l_y, b and y "
            "are needed. Pass two clouds, or two clouds with their weights in front."
        )
    check_tensors(**dict(zip(NAMES[len(args)], args, strict=True)))


def _weighted(args: tuple[Tensor, ...]) -> list[Any]:
    """l_x, a, x, l_y, b, y; labels are None where there are none."""
    if len(args) == 2:
        args = (_uniform(args[0]), args[0], _uniform(args[1]), args[1])
    l_x, l_y = (args[0], args[3]) if len(args) == 6 else (None, None)
    a, x, b, y = args if len(args) == 4 else (*args[1:3], *args[4:])
    return [_flat(l_x, x), _flat(a, x), x, _flat(l_y, y), _flat(b, y), y]


def _uniform(points: Tensor) -> Tensor:
    """1 / N, widened: rounded to 16 bits, 1 / M and 1 / N make masses that differ."""
    count = max(1, whole().number(points.shape[-2:-1].numel()))
    (wide,) = widened(points)
    return wide.new_full(points.shape[:-1], 1 / count)


def _flat(values: Tensor | None, points: Tensor) -> Tensor | None:
    """(*batch, N) of (*batch, N, 1)"""
    if values is None or values.shape != (*points.shape[:-1], 1):
        return values
    return values.squeeze(-1)
