"""Linear systems whose operator is a reduction: conjugate gradients, differentiable in everything.

    (α + K) a = b,   K a = Σ_j k(x_i, y_j) a_j symmetric and positive definite

The derivative is that of the equation, not of the iterations: with A λ = g,

    ∂b = λ,   ∂θ = −⟨λ, (∂A/∂θ) a⟩,   da = A⁻¹ (db − dA a)

and both are solved by the same function, so all orders exist.  A preconditioner changes the number
of iterations alone; see `preconditioners`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError
from torchweft.reductions.engine.whole import Whole, together, whole
from torchweft.reductions.formula.node import read
from torchweft.reductions.genred import Genred
from torchweft.reductions.kernel_matrix import KernelMatrix, check_square, kernel_matrix
from torchweft.reductions.keywords import ACCURACY_KEYWORDS, AccuracyKeywords, CallKeywords
from torchweft.reductions.preconditioners import (
    FACTORS,
    ConvergenceError,
    apply_low_rank,
    low_rank,
    sketched,
)
from torchweft.reductions.variables import (
    Variable,
    extent,
    places,
    require_count,
    require_tensors,
    values,
)

__all__ = ["ConvergenceError", "KernelSolve", "SolveKeywords", "Solved", "conjugate_gradient"]

MOST_ITERATIONS = 10_000

RANK = 100
"""Columns of a preconditioner."""

LEAST_RIDGE, ERRORS_OF_RIDGE = 1e-10, 16
"""The default ridge: pykeops', or what keeps the condition number below 1 / (16 eps) of the dtype,
for which conjugate gradients need about ½ √κ log(2 / 10⁻⁶) ≈ 5300 iterations in float32."""

Linear = Callable[..., Tensor]


class _System(NamedTuple):
    """A linear system, and when its iteration ends.

    Args:
        apply: (v, *tensors) -> A v.
        eps: ‖b − A a‖ ≤ eps ‖b‖ ends the iteration.
        max_iter: most iterations.
        preconditioner: (r, *tensors) -> about A⁻¹ r, or None.
        batch_dims: number of leading dimensions that index separate systems.
        whole: where the rows of the systems stand.
    """

    apply: Linear
    eps: float
    max_iter: int
    preconditioner: Linear | None
    batch_dims: int
    whole: Whole

    def dot(self, u: Tensor, v: Tensor) -> Tensor:
        """⟨u, v⟩ of each system."""
        dims = self._dims(u)
        return self.whole.total((u * v).sum(dims, keepdim=True) if dims else u * v)

    def size(self, u: Tensor) -> Tensor:
        """The largest |u| of each system, 1 where that is 0."""
        dims = self._dims(u)
        if u.numel():
            scale = u.abs().amax(dims, keepdim=True) if dims else u.abs()
        else:
            scale = u.new_zeros(*u.shape[: self.batch_dims], *[1] * len(dims))
        scale = self.whole.largest(scale)
        return scale.where(scale != 0, 1)

    def _dims(self, u: Tensor) -> tuple[int, ...]:
        return tuple(range(self.batch_dims, u.ndim))


@together
def conjugate_gradient(
    apply: Linear,
    rhs: Tensor,
    tensors: Sequence[Tensor] = (),
    *,
    eps: float = 1e-6,
    max_iter: int = MOST_ITERATIONS,
    preconditioner: Linear | str | None = None,
    rank: int = RANK,
    batch_dims: int = 0,
) -> Tensor:
    """a with A a = rhs, where A v = apply(v, *tensors) is symmetric and positive definite.

    Symmetry is not checked.  Differentiable to any order in rhs and in `tensors`, also by jvp and
    vmap; other tensors that `apply` reads are constants.  Synchronizes with the device at every
    iteration.

    Args:
        apply: linear in its first argument, which has the shape of rhs.
        rhs: float32 or float64.
        tensors: the tensors that A depends on.
        eps: the iteration ends where ‖rhs − A a‖ ≤ eps ‖rhs‖, by the recurrence of the residual.
        max_iter: most iterations.
        preconditioner: r -> about A⁻¹ r, symmetric and positive definite; "nystrom": made of `rank`
            products of A with random vectors, the same at every call.
        rank: of "nystrom".
        batch_dims: number of leading dimensions of rhs that index separate systems, each solved to
            eps; all other dimensions belong to one system.

    Returns:
        a, of the shape of rhs.

    Inside `torchweft.distributed.all_pairs` the first dimension after those of the batch are this
    rank's rows of the systems, and `apply` and `preconditioner` map those of all ranks.

    Raises:
        ConvergenceError: NaN or infinity occurred, or max_iter iterations were not enough.
        ShapeError: apply returns another shape, eps or max_iter is negative, or there is no
            preconditioner of that name.
        DTypeError: rhs is neither float32 nor float64.

    Cost: an iteration calls `apply` once, on a vector of the shape of rhs.

    Example:
        >>> import torch
        >>> from torchweft.reductions import conjugate_gradient
        >>> diagonal, rhs = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([3.0, 4.0, 4.0])
        >>> conjugate_gradient(lambda v, d: d * v, rhs, [diagonal]).round(decimals=3).tolist()
        [3.0, 2.0, 1.0]
    """
    _agree("conjugate_gradient", rhs, tensors, eps, max_iter, batch_dims)
    made: Sequence[Tensor] = ()
    if _kind(preconditioner, ("nystrom",), rank) in FACTORS:
        made = sketched(lambda v: apply(v, *tensors), rhs.detach(), rank, batch_dims)
        preconditioner = apply_low_rank
    return _solved(apply, rhs, tensors, made, eps, max_iter, preconditioner, batch_dims)


def _agree(
    name: str, rhs: Tensor, tensors: Sequence[Tensor], eps: float, max_iter: int, batch_dims: int
) -> None:
    """Check the arguments of a solution, which must be equal in every process."""
    if rhs.dtype not in (torch.float32, torch.float64):
        raise DTypeError(
            f"rhs is {rhs.dtype}: conjugate gradients need float32 or float64. Pass rhs.float()."
        )
    if not eps >= 0 or max_iter < 0:
        raise ShapeError(
            f"eps is {eps} and max_iter {max_iter}: both must be 0 or more. Pass eps=1e-6, the "
            "part of rhs that may be left, and some thousand iterations."
        )
    whole().agree(
        name,
        lambda: {
            "shape of a row of rhs": (*rhs.shape[:batch_dims], *rhs.shape[batch_dims + 1 :]),
            "dtype": rhs.dtype,
            "eps": eps,
            "max_iter": max_iter,
            "requires_grad": [isinstance(t, Tensor) and t.requires_grad for t in (rhs, *tensors)],
        },
    )


def _solved(
    apply: Linear,
    rhs: Tensor,
    tensors: Sequence[Tensor],
    made: Sequence[Tensor],
    eps: float,
    max_iter: int,
    preconditioner: Any,
    batch_dims: int,
) -> Tensor:
    """The solution; `made` are the constants that the preconditioner takes after the residual."""
    there, count = whole(), len(tensors)

    def apply_all(v: Tensor, *given: Tensor) -> Tensor:
        return apply(v, *given[:count])

    def precondition(r: Tensor, *given: Tensor) -> Tensor:
        found: Tensor = preconditioner(r, *given[count:])
        return found

    second = None if preconditioner is None else there.keeping(precondition)
    system = _System(there.keeping(apply_all), eps, max_iter, second, batch_dims, there)
    solution: Tensor = _Solve.apply(system, rhs, *tensors, *made)  # type: ignore[no-untyped-call]
    return solution


def _kind(preconditioner: Linear | str | None, names: Sequence[str], rank: int) -> str | None:
    """What a preconditioner is: its name, "function" or None, equal in every process."""
    kind = "function" if callable(preconditioner) else preconditioner
    if kind not in (None, "function", *names) or rank < 1:
        raise ShapeError(
            f"preconditioner is {preconditioner!r} and rank {rank}: it must be "
            f"{' or '.join(map(repr, names))} here, a function r -> about A⁻¹ r, or None, and rank "
            "1 or more. Pass one of them."
        )
    whole().agree("a preconditioner", lambda: {"preconditioner": kind, "rank": rank})
    return kind


class SolveKeywords(CallKeywords, AccuracyKeywords, total=False):
    """The keywords of a lazy tensor's solution, beside alpha and eps; see `KernelSolve`."""

    max_iter: int
    preconditioner: Linear | str | None
    rank: int


class KernelSolve:
    """a with (α + K) a = b, where K a = Σ_j or Σ_i of a formula that is linear in a.

    Args:
        formula: as `Genred` takes it, symmetric and positive definite in one of its variables.
        aliases: its variables, "x = Vi(3)".
        varinvalias: the name of the unknown variable, or "Var(index,dim,cat)".
        axis: 1 reduces over j, 0 over i.
        options: the other keywords of `Genred`.

    Raises:
        ShapeError: a variable of that name is not among the aliases, or a formula that cannot be
            read.

    Source: the names of pykeops.

    Example:
        >>> import torch
        >>> from torchweft.reductions import KernelSolve
        >>> aliases = ["x = Vi(1)", "y = Vj(1)", "a = Vj(1)"]
        >>> system = KernelSolve("Exp(-SqDist(x, y)) * a", aliases, "a", axis=1)
        >>> x, b = torch.tensor([[0.0], [9.0]]), torch.tensor([[2.0], [4.0]])
        >>> system(x, x, b, alpha=1.0).round(decimals=3).tolist()
        [[1.0], [2.0]]
    """

    def __init__(
        self,
        formula: str,
        aliases: Sequence[str],
        varinvalias: str,
        axis: int = 0,
        **options: Unpack[AccuracyKeywords],
    ) -> None:
        self._unknown = _position(varinvalias, aliases)
        self._reduction = Genred(formula, list(aliases), "Sum", axis, **options)

    @together
    def __call__(
        self,
        *args: Tensor,
        alpha: float | Tensor | None = None,
        eps: float = 1e-6,
        max_iter: int = MOST_ITERATIONS,
        preconditioner: Linear | str | None = None,
        rank: int = RANK,
        **options: Unpack[CallKeywords],
    ) -> Tensor:
        """The solution, differentiable in all arguments and in alpha.

        Args:
            args: the variables of the formula, with b in the place of the unknown.
            alpha: ridge, added to the diagonal.  None is pykeops' 1e-10, and at least
                16 eps tr K with the eps of the dtype that it computes in, float32 for 16 bits: a
                smaller one is lost in the rounding errors of K.
            eps: bound of the norm of the residual relative to ‖b‖, for each entry of a batch.
            max_iter: most iterations.
            preconditioner: "nystrom" of `rank` rows that are drawn evenly, the same at every call;
                "pivoted_cholesky" of the `rank` rows that are least explained by those before; a
                function r -> about (α + K)⁻¹ r; or None.
            rank: rows of a preconditioner.
            options: backend, device_id and ranges, as `Genred` takes them.

        Returns:
            a, of the shape and dtype of b.

        Raises:
            ConvergenceError: NaN or infinity occurred, or max_iter iterations were not enough.
            ShapeError: too few arguments, a system that is not square, ranges beside a
                preconditioner by name, or a formula that does not reduce over the unknown.

        Cost: an iteration is one reduction.  A preconditioner evaluates `rank` columns of K, and
        keeps them and as much again for a moment, in float64.
        """
        self._check_args(args)
        dtype = args[self._unknown].dtype
        wide = torch.promote_types(dtype, torch.float32)
        tensors = [a.to(wide) for a in args]
        rhs = tensors[self._unknown]
        others = [*tensors[: self._unknown], *tensors[self._unknown + 1 :]]
        batch_dims = max(rhs.ndim - 2, 0)

        def apply(v: Tensor, ridge: Tensor, *others: Tensor) -> Tensor:
            values = [*others[: self._unknown], v, *others[self._unknown :]]
            product: Tensor = self._reduction(*values, **options)
            check_square(product.shape, v.shape)
            return product + ridge * v

        _agree("KernelSolve", rhs, others, eps, max_iter, batch_dims)
        if _kind(preconditioner, tuple(FACTORS), rank) in FACTORS:
            _check_no_ranges(preconditioner, options)
        like: Any = {"dtype": wide, "device": rhs.device}
        ridge = self._ridge(tensors) if alpha is None else torch.as_tensor(alpha, **like)
        made: Sequence[Tensor] = ()
        if isinstance(preconditioner, str):
            made = low_rank(preconditioner, self._matrix(tensors), rank, ridge)
            preconditioner = apply_low_rank
        given = (ridge, *others)
        found = _solved(apply, rhs, given, made, eps, max_iter, preconditioner, batch_dims)
        return found.to(dtype)

    def _check_args(self, args: tuple[Tensor, ...]) -> None:
        if len(args) <= self._unknown:
            raise ShapeError(
                f"KernelSolve is called with {len(args)} arguments: the unknown is number "
                f"{self._unknown} of the formula's, counted from 0. Pass one tensor for each, with "
                "b in its place."
            )
        require_tensors(args)

    def _matrix(self, tensors: Sequence[Tensor]) -> KernelMatrix:
        spec = self._reduction._spec
        f = read(spec.formula) if isinstance(spec.formula, str) else spec.formula
        return kernel_matrix(f, self._unknown, spec.axis, tensors)

    def _ridge(self, tensors: Sequence[Tensor]) -> Tensor:
        """The default ridge of each entry of the batch, (*batch, 1, 1)."""
        diagonal = self._matrix(tensors).diagonal()
        trace = whole().total(diagonal.sum(-1))[..., None, None]
        least = ERRORS_OF_RIDGE * torch.finfo(trace.dtype).eps * trace
        return least.clamp(min=LEAST_RIDGE)


class Solved:
    """The solution of a linear system as a function of its symbolic variables.

    Its call takes one argument for each, by index; the right-hand side has the index of the
    unknown, unless it holds data.
    """

    def __init__(
        self,
        linear: Any,
        unknown: Variable,
        rhs: Variable,
        axis: int,
        options: dict[str, Any],
    ) -> None:
        self._linear, self._unknown, self._rhs = linear, unknown, rhs
        self._axis, self._options = axis, options
        needed = [v for v in linear._variables if rhs.place is not None or v.place != unknown.place]
        self.places = places(needed)

    @property
    def callfun(self) -> Solved:
        """Self, by pykeops' name."""
        return self

    def __call__(self, *args: Tensor, **options: Unpack[SolveKeywords]) -> Tensor:
        """The solution for these arguments."""
        require_count("system", len(args), self.places)
        origin, variables = self._linear, self._linear._variables
        number = next(n for n, v in enumerate(variables) if v.place == self._unknown.place)
        exact = {**self._options, **options}
        settings = {key: exact.pop(key) for key in ACCURACY_KEYWORDS if key in exact}
        given = [origin._tensor(a) for a in args]
        bound = [
            self._rhs if n == number and self._rhs.place is None else v
            for n, v in enumerate(variables)
        ]
        system = KernelSolve(
            origin._formula,
            [f"Var({n},{v.dim},{v.cat})" for n, v in enumerate(variables)],
            f"Var({number},{self._unknown.dim},{self._unknown.cat})",
            self._axis,
            **settings,
        )
        exact["ranges"] = origin._tensor(exact["ranges"])
        known = extent(self._rhs) if self._rhs.place is None else origin._extent
        found: Tensor = origin._finished(system(*values(bound, known, given), **exact))
        return found


def _position(name: str, aliases: Sequence[str]) -> int:
    """The position of a variable among the arguments."""
    if name.replace(" ", "").startswith("Var("):
        return int(name.split("(")[1].split(",")[0])
    names = [alias.split("=")[0].strip() for alias in aliases]
    if name not in names:
        raise ShapeError(
            f"varinvalias is {name!r} but the variables are {', '.join(names)}: it must be the one "
            "that is solved for. Pass its name."
        )
    return names.index(name)


class _Solve(torch.autograd.Function):
    """a = A⁻¹ b; its derivatives are solutions with the same A."""

    @staticmethod
    def forward(system: _System, rhs: Tensor, *tensors: Tensor) -> Tensor:
        return _iterate(system, rhs, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.system, _, *tensors = inputs
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        solution, *tensors = ctx.saved_tensors
        adjoint = _Solve.apply(ctx.system, grads[0], *tensors)  # type: ignore[no-untyped-call]
        needed = [n for n, need in enumerate(ctx.needs_input_grad[2:]) if need]
        of_tensors: list[Tensor | None] = [None] * len(tensors)
        if needed:
            product, values = _along(ctx.system.apply, solution, tensors, needed)
            found = torch.func.vjp(product, *values)[1](-adjoint)
            for n, gradient in zip(needed, found, strict=True):
                of_tensors[n] = gradient
        return None, adjoint, *of_tensors

    @staticmethod
    def jvp(ctx: Any, _: None, rhs: Tensor | None, *tangents: Tensor | None) -> Tensor:
        solution, *tensors = ctx.saved_tensors
        change = torch.zeros_like(solution) if rhs is None else rhs
        moved = [n for n, t in enumerate(tangents) if t is not None]
        if moved:
            product, values = _along(ctx.system.apply, solution, tensors, moved)
            # forward mode does not nest: the pullback of the linear pullback is the pushforward
            pull = torch.func.vjp(product, *values)[1]
            push = torch.func.vjp(pull, torch.zeros_like(solution))[1]
            change = change - push(tuple(tangents[n] for n in moved))[0]
        found: Tensor = _Solve.apply(ctx.system, change, *tensors)  # type: ignore[no-untyped-call]
        return found

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], system: _System, rhs: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        where = in_dims[1]
        rows = rhs.expand(info.batch_size, *rhs.shape) if where is None else rhs.movedim(where, 0)
        dims = (0, *in_dims[2:])
        more = system._replace(
            apply=torch.func.vmap(system.apply, dims),
            preconditioner=system.preconditioner and torch.func.vmap(system.preconditioner, dims),
            batch_dims=system.batch_dims + 1,
        )
        return _Solve.apply(more, rows, *tensors), 0  # type: ignore[no-untyped-call]


def _along(
    apply: Linear, solution: Tensor, tensors: Sequence[Tensor], chosen: Sequence[int]
) -> tuple[Linear, tuple[Tensor, ...]]:
    """A a as a function of the chosen tensors alone, and their values."""

    def product(*values: Tensor) -> Tensor:
        all_values = list(tensors)
        for n, value in zip(chosen, values, strict=True):
            all_values[n] = value
        return apply(solution, *all_values)

    return product, tuple(tensors[n] for n in chosen)


def _iterate(system: _System, rhs: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Conjugate gradients of separate systems; those that have converged are not updated."""
    if not rhs.numel() and not system.whole.spread:
        return torch.zeros_like(rhs)
    dot, scale = system.dot, system.size(rhs)
    residual = rhs / scale  # squares of tiny numbers underflow

    def precondition(r: Tensor) -> Tensor:
        if system.preconditioner is None:
            return r
        return _applied(system, system.preconditioner, r, *tensors)

    limit = system.eps**2 * dot(residual, residual)
    solution = torch.zeros_like(residual)
    direction = preconditioned = precondition(residual)
    size = dot(residual, preconditioned)
    for iteration in range(system.max_iter + 1):
        left = dot(residual, residual)
        if _done(left, limit, iteration, system):
            return solution * scale
        product = _applied(system, system.apply, direction, *tensors)
        open_ = left > limit
        step = torch.where(open_, size / dot(direction, product), 0)
        solution = solution + step * direction
        residual = residual - step * product
        preconditioned = precondition(residual)
        before, size = size, dot(residual, preconditioned)
        direction = preconditioned + torch.where(open_, size / before, 0) * direction
    raise AssertionError("unreachable: the last iteration raises")


def _applied(system: _System, function: Linear, v: Tensor, *tensors: Tensor) -> Tensor:
    """The operator or the preconditioner of v, with its shape in every process."""
    product = function(v, *tensors)

    def describe() -> dict[str, Any]:
        check_square(product.shape, v.shape)
        return {}

    system.whole.agree("the operator of a system", describe)
    return product


def _check_no_ranges(preconditioner: Any, options: Mapping[str, Any]) -> None:
    if options.get("ranges") is not None:
        raise ShapeError(
            f"preconditioner={preconditioner!r} is given with ranges: it is made of whole columns, "
            "without a mask. Pass a function r -> about (α + K)⁻¹ r, or leave one of them out."
        )


def _done(left: Tensor, limit: Tensor, iteration: int, system: _System) -> bool:
    """Whether all systems have converged; raises ConvergenceError if they cannot."""
    excess = float((left - limit).amax())
    if not math.isfinite(excess):
        raise ConvergenceError(
            f"conjugate gradients met NaN or infinity at iteration {iteration}: rhs, the operator "
            "or one of its tensors is not finite, or the operator is not positive definite. Check "
            "the inputs, or pass a larger alpha."
        )
    if excess > 0 and iteration == system.max_iter:
        ratio = system.eps * float((left / limit).amax().sqrt())
        raise ConvergenceError(
            f"conjugate gradients left a residual of {ratio:.1e} of rhs after {iteration} "
            f"iterations: {system.eps:.1e} is needed. Pass a larger alpha, eps or max_iter, or a "
            "preconditioner."
        )
    return excess <= 0
