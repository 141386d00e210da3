"""Lazy tensors of real numbers, and what they share with those of complex ones."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, Unpack, overload

import torch
from torch import Tensor

from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.reductions import variables as symbolic
from torchweft.reductions.call import kept
from torchweft.reductions.cluster.points import swap_axes
from torchweft.reductions.genred import reduction_spec
from torchweft.reductions.keywords import (
    ACCURACY_KEYWORDS,
    CALL_KEYWORDS,
    DEFAULT_OPTIONS,
    Keywords,
    accuracy,
    require_keywords,
)
from torchweft.reductions.lazy.operations import Operations
from torchweft.reductions.lazy.reductions import Reduced, Reductions, direct_result
from torchweft.reductions.solve import Solved, SolveKeywords
from torchweft.reductions.variables import (
    DTYPE_NAMES,
    NO_EXTENT,
    Extent,
    Formula,
    Variable,
    agree,
    components,
    extent,
    extent_of,
    join,
    places,
    require_real,
    require_strided,
    require_tensors,
    symbol,
    variable_of,
)

if TYPE_CHECKING:
    from torchweft.reductions.lazy.complex_tensors import ComplexLazyTensor

__all__ = ["Data", "LazyTensor", "with_imaginary_part"]

Data: TypeAlias = Tensor | complex | list[Any] | tuple[int, int, int]
"""What a lazy tensor is made of: a tensor, numbers, or (index, dim, category) of a symbol."""


class LazyTensor(Operations, Reductions):
    """f(x_i, y_j, p) for all pairs: shape (..., M, N, D), of which only x, y and p are stored.

    Args:
        x: data, one of

            - a float, a list, or a tensor of at most one dimension: a parameter;
            - an integer: a constant;
            - a tensor (M, D) with axis 0, or (N, D) with axis 1;
            - a tensor (..., M, 1, D), (..., 1, N, D) or (..., 1, 1, D), which varies with i, with j
              or with neither; leading dimensions are batches, and broadcast;
            - (index, dim, category): a symbolic variable, argument number `index` of the callable
              that a reduction returns.

            Complex numbers give a ComplexLazyTensor.
        axis: of a tensor of two dimensions: 0 varies with i, 1 with j.
        is_complex: whether to return a ComplexLazyTensor.

    Operations, numbers and reductions are those of `pykeops.torch.LazyTensor`.  Lazy tensors are
    immutable, except for the attributes `ranges` (six arrays, see `Genred`) and `backend`, which
    results of operations inherit.

    Raises:
        ShapeError: x has no shape of a variable, see above.
        DTypeError: x holds neither real nor complex floating-point numbers.

    Error: that of the formula in plain PyTorch, and of sums u|z*| + 4√N·2⁻²⁴ Σ|f| (2⁻⁵³ for
    float64), u the dtype's unit round-off.  Differentiable to any order.

    Cost: operations build the formula alone.  A reduction evaluates it M · N times; its memory is
    that of the data and of the result.

    Example:
        >>> import torch
        >>> from torchweft.reductions import LazyTensor
        >>> x, y = torch.zeros(2, 1, 3), torch.ones(1, 4, 3)  # (M, 1, D) and (1, N, D)
        >>> K = (-((LazyTensor(x) - LazyTensor(y)) ** 2).sum(-1)).exp()
        >>> K.shape, K.sum(1).shape, (K @ torch.ones(4, 2)).shape
        ((2, 4), torch.Size([2, 1]), torch.Size([2, 2]))
    """

    is_complex = False
    real_class: ClassVar[type[LazyTensor]]
    complex_class: ClassVar[type[ComplexLazyTensor]]

    _formula: Formula
    _variables: tuple[Variable, ...]
    _extent: Extent
    ranges: Any
    backend: str | None

    def __new__(
        cls, x: Data | None = None, axis: int | None = None, is_complex: bool = False
    ) -> Self:
        """An instance of the complex class, for complex data."""
        made = cls.complex_class if is_complex or cls._is_complex_data(x) else cls
        return object.__new__(made)  # type: ignore[return-value]

    def __init__(
        self, x: Data | None = None, axis: int | None = None, is_complex: bool = False
    ) -> None:
        found = self._constant_or_variable(x, axis)
        if isinstance(found, int):
            self._set(symbolic.number(found), (), NO_EXTENT)
        else:
            self._set(symbolic.leaf(0, found.dim, found.cat), (found,), extent(found))

    def _set(
        self,
        formula: Formula,
        variables: tuple[Variable, ...],
        known: Extent,
        ranges: Any = None,
        backend: str | None = None,
    ) -> Self:
        self._formula, self._variables, self._extent = formula, variables, known
        self.ranges, self.backend = ranges, backend
        return self

    # Data

    @classmethod
    def _is_complex_data(cls, x: Any) -> bool:
        if isinstance(x, list):
            return any(isinstance(v, complex) for v in x)
        return isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex())

    @classmethod
    def _tensor(cls, x: Any) -> Any:
        """The tensor of an array; anything else unchanged."""
        return x

    @classmethod
    def _target(cls, out: Any) -> Any:
        """The memory of an `out`, as a tensor of real numbers."""
        return cls._tensor(out)

    @classmethod
    def _array(cls, x: Tensor) -> Tensor:
        """The array of a tensor."""
        return x

    @classmethod
    def _constant_or_variable(cls, x: Any, axis: int | None) -> Variable | int:
        x = cls._tensor(x)
        if isinstance(x, Tensor):
            return variable_of(x, axis)
        if isinstance(x, tuple):
            return symbol(x, axis)
        if isinstance(x, numbers.Integral):
            return operator.index(x)
        if isinstance(x, numbers.Real) or (
            isinstance(x, list) and all(isinstance(v, numbers.Real) for v in x)
        ):
            if axis not in (None, 2):
                raise ShapeError(
                    f"x is {x!r} with axis={axis}: numbers are a parameter. Leave out axis, or "
                    "pass a tensor (M, D)."
                )
            found = tuple(float(v) for v in x) if isinstance(x, list) else (float(x),)
            return Variable(found, None, len(found), 2)
        raise DTypeError(
            f"x is a {type(x).__name__}: a lazy tensor is made of a tensor, numbers, a list of "
            "numbers, or (index, dim, category). Convert it, arrays with torch.from_numpy, or take "
            "torchweft.reductions.numpy."
        )

    @classmethod
    def _of_category(cls, x_or_ind: Any, dim: int | None, cat: int | None) -> LazyTensor:
        """Var, Vi, Vj and Pm: symbolic with `dim`, else of data (..., M or N, D) or (..., D)."""
        if dim is not None:
            symbolic: Any = (x_or_ind, dim, cat)
            return cls.real_class(symbolic)
        data = cls._tensor(x_or_ind)
        if not isinstance(data, Tensor) or cat is None:
            return cls.real_class(x_or_ind, axis=cat)
        require_strided(data)
        data = data.reshape(1) if data.dim() == 0 and cat == 2 else data
        made = cls.real_class
        if data.is_complex():
            made, data = cls.complex_class, cls.complex_class._pairs(data)
        formula, dim, known = _leaf(cat, data.shape, data.dtype, data.device)
        return object.__new__(made)._set(formula, (Variable(data, None, dim, cat),), known)

    def _wrap(self, value: Any) -> LazyTensor:
        if isinstance(value, LazyTensor):
            return value
        if isinstance(value, Reduced):
            raise ShapeError(
                "an operand is a reduction that was not called: it has no pairs any more. Call it "
                "with its arguments, and make a lazy tensor of the result."
            )
        return self.real_class(value)

    # Properties

    @property
    def ndim(self) -> int:
        """The number of components of a pair."""
        return int(symbolic.dimension(self._formula))

    @property
    def _components(self) -> int:
        return self.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., M, N, D), or (..., M, N) for one component; unknown sizes are 1."""
        last = [] if self._components == 1 else [self._components]
        return (*self._shape[:-1], *last)

    @property
    def _shape(self) -> tuple[int, ...]:
        """(..., M, N, D), also for one component; a complex number counts as two, as in pykeops."""
        known = self._extent
        sizes = [1 if n is None else n for n in (known.rows, known.columns)]
        return (*known.batch, *sizes, self.ndim)

    def dim(self) -> int:
        """The number of dimensions: batch, i, j, and components even if there is one."""
        return len(self._extent.batch) + 3

    @property
    def nbatchdims(self) -> int:
        """The number of batch dimensions."""
        return len(self._extent.batch)

    @property
    def dtype(self) -> str | None:
        """The name of the dtype; None for numbers and symbolic variables only."""
        return None if self._extent.dtype is None else DTYPE_NAMES[self._extent.dtype]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({symbolic.shown(self._formula)}, shape={self.shape})"

    # Operations

    def _apply(self, name: str, *others: Any, data: tuple[Any, ...] = ()) -> Any:
        operands = [o if isinstance(o, LazyTensor) else self._wrap(o) for o in others]
        if not self.is_complex:
            require_real(name, operands)
        formulas, moves, *joined = self._join(name, operands)
        try:
            formula = symbolic.applied(name, formulas, moves, data)
        except ShapeError as error:
            shapes = " and ".join(str(operand.shape) for operand in (self, *operands))
            raise type(error)(f"{name} of {shapes}: {error}") from None
        is_complex = name in _TO_COMPLEX or (self.is_complex and name not in _TO_REAL)
        cls = self.complex_class if is_complex else self.real_class
        return object.__new__(cls)._set(formula, *joined)

    def _join(self, name: str, others: Sequence[LazyTensor]) -> tuple[Any, ...]:
        """The formulas, their renumberings, and the arguments of `_set` that all operands share."""
        variables, known = self._variables, self._extent
        ranges, backend = self.ranges, self.backend
        formulas: tuple[Formula, ...] = (self._formula,)
        moves: tuple[Any, ...] = ((),)
        for other in others:
            variables, renumbering = join(variables, other._variables)
            formulas, moves = (*formulas, other._formula), (*moves, renumbering)
            known = agree(known, other._extent, _joined, name, self, other)
            if ranges is not other.ranges:
                ranges = _same_ranges(name, ranges, other.ranges)
            if backend != other.backend:
                backend = _same_backend(name, backend, other.backend)
        return formulas, moves, variables, known, ranges, backend

    def _arithmetic(self, sign: str, other: Any, reflected: bool) -> Any:
        other = other if isinstance(other, LazyTensor) else self._wrap(other)
        if other.is_complex:
            return other._arithmetic(sign, self, not reflected)
        return other._apply(sign, self) if reflected else self._apply(sign, other)

    def _without(self, v: LazyTensor) -> Self:
        """Self without the symbolic variable v, which its formula does not read."""
        lost = {known.place for known in v._variables} - {None}
        kept = [k for k, known in enumerate(self._variables) if known.place not in lost]
        moves = tuple((k, m, *self._variables[k][2:]) for m, k in enumerate(kept) if m != k)
        return object.__new__(type(self))._set(
            symbolic.renumbered(self._formula, moves),
            tuple(self._variables[k] for k in kept),
            self._extent,
            self.ranges,
            self.backend,
        )

    def t(self) -> Self:
        """The same pairs with i and j exchanged."""
        known = self._extent
        return object.__new__(type(self))._set(
            symbolic.swapped(self._formula),
            tuple(v if v.cat == 2 else v._replace(cat=1 - v.cat) for v in self._variables),
            known._replace(rows=known.columns, columns=known.rows),
            self.ranges.t() if hasattr(self.ranges, "t") else swap_axes(self.ranges),
            self.backend,
        )

    @property
    def T(self) -> Self:  # noqa: N802  # numpy's name
        """`t()`."""
        return self.t()

    # Reductions

    def reduction(
        self,
        reduction_op: str,
        other: Any = None,
        opt_arg: Any = None,
        axis: int | None = None,
        dim: int | None = None,
        call: bool = True,
        **options: Any,
    ) -> Any:
        """The reduction of a name of `Genred`; see `sum` and its kin for types.

        Args:
            reduction_op: its name.
            other: the weight.
            opt_arg: K.
            axis: 0 (over i) or 1 (over j), after the batch dimensions.
            dim: the same.
            call: False returns a callable instead of the result.
            options: the keywords of `Genred` and of its call.

        Returns:
            What `Genred` returns; with call=False or symbolic variables, a callable.
        """
        batch = len(self._extent.batch)
        axis, dim = (dim, None) if axis is None else (axis, dim)
        if axis is None or axis not in (batch, batch + 1) or dim not in (None, axis):
            both = f"axis {axis}" if dim is None else f"axis {axis} and dim {dim}"
            raise ShapeError(
                f"{reduction_op} is asked for {both} of a lazy tensor of shape {self.shape}: "
                f"it must be {batch} (over i) or {batch + 1} (over j). "
                "Pass axis or dim."
            )
        variables, known, weight = self._variables, self._extent, None
        ranges, backend = self.ranges, self.backend
        if other is not None:
            other = self._wrap(other)
            require_real(reduction_op, [other])
            joined = self._join(reduction_op, [other])
            (_, weight), (_, renumbering), variables, known, ranges, backend = joined
            weight = symbolic.renumbered(weight, renumbering)
        arguments = reduction_op, self._formula, weight, opt_arg, axis - batch
        if call and ranges is None and not options:
            found = direct_result(arguments, variables, known, backend)
            if found is not None:
                return self._finished(found)
        require_keywords(reduction_op, options, (*ACCURACY_KEYWORDS, *CALL_KEYWORDS))
        given = (
            {key: options.pop(key) for key in ACCURACY_KEYWORDS if key in options}
            if options
            else {}
        )
        exact = accuracy(**given) if given else DEFAULT_OPTIONS
        options = {"ranges": ranges, "backend": backend} | options
        spec = reduction_spec(*arguments, exact)
        reduced: Reduced[Any] = Reduced(spec, variables, known, options, self)
        return reduced if not call or reduced.places else reduced()

    def _finished(self, result: Any) -> Any:
        """The result as arrays of the caller's library."""
        if isinstance(result, Tensor):
            return self._array(result)
        return tuple(self._array(r) for r in result)

    def __matmul__(self, v: Tensor, **options: Unpack[Keywords]) -> Tensor:
        """Σ_j K_ij v_j, for K of one component.

        Args:
            v: (N,) or (..., N, E), in K's dtype, or complex beside a real or complex K.
            options: the keywords of `Genred` and of its call.

        Returns:
            (..., M) for (N,), else (..., M, E).
        """
        if self._components != 1:
            raise ShapeError(
                f"K @ v is asked of a lazy tensor of shape {self.shape}: K must have one "
                "component. Take one with elem, or reduce the components with sum(-1)."
            )
        data = self._tensor(v)
        require_tensors([data])
        vector = data.dim() == 1
        product = self * self._of_category(data[:, None] if vector else data, None, 1)
        result: Tensor = product.sum(product.dim() - 2, **options)
        return result[..., 0] if vector else result

    @overload
    def solve(
        self,
        other: Tensor | LazyTensor,
        var: LazyTensor | None = None,
        call: Literal[True] = True,
        alpha: float | Tensor | None = None,
        eps: float = 1e-6,
        **options: Unpack[SolveKeywords],
    ) -> Tensor: ...
    @overload
    def solve(
        self,
        other: Tensor | LazyTensor,
        var: LazyTensor | None = None,
        *,
        call: Literal[False],
        alpha: float | Tensor | None = None,
        eps: float = 1e-6,
        **options: Unpack[SolveKeywords],
    ) -> Solved: ...
    def solve(
        self,
        other: Any,
        var: LazyTensor | None = None,
        call: bool = True,
        alpha: Any = None,
        eps: float = 1e-6,
        **options: Any,
    ) -> Any:
        """a with (α + K) a = b, by conjugate gradients; see `KernelSolve`.

        A complex K is Hermitian.

        Args:
            other: b, a tensor (M, E), or a lazy tensor of one variable.
            var: the symbolic variable a in which self is linear; without it K a is Σ self · a.
            call: False returns a callable of the symbolic variables.
            alpha: added to the diagonal; None chooses, see `KernelSolve`.
            eps: bound of the norm of the residual, relative to the norm of b.
            options: the keywords of `Genred`, its call and `KernelSolve`, such as preconditioner.

        Returns:
            a, of the shape and dtype of b; with call=False or symbolic variables, a callable.

        Raises:
            ConvergenceError: NaN or infinity occurred, or max_iter iterations were not enough.
            ShapeError: b is no single variable of i or of j.
            DTypeError: b is real where the unknown is complex, or the reverse.
        """
        lazy = self._wrap_rhs(other)
        rhs = lazy._variables[0]
        axis = 1 - rhs.cat
        linear = self
        if var is None:
            place = places(self._variables) if rhs.place is None else rhs.place
            var = self.real_class((place, rhs.dim, axis), is_complex=lazy.is_complex)
            linear = self * var
        if var.is_complex != lazy.is_complex:
            kinds = ["real", "complex"]
            raise DTypeError(
                f"var is {kinds[var.is_complex]} but the right-hand side is "
                f"{kinds[lazy.is_complex]}: they hold the same kind of numbers. Make complex "
                "symbols with LazyTensor((index, 2 D, category), is_complex=True)."
            )
        own = {"ranges": self.ranges, "backend": self.backend, "alpha": alpha, "eps": eps}
        solved = Solved(linear, var._variables[0], rhs, axis, own | options)
        return solved() if call and not solved.places else solved

    def _wrap_rhs(self, other: Any) -> LazyTensor:
        """The right-hand side, one variable; complex beside a complex K."""
        lazy = other if isinstance(other, LazyTensor) else self._of_category(other, None, 0)
        if len(lazy._variables) != 1 or lazy._variables[0].cat == 2:
            raise ShapeError(
                f"solve is given {other!r}: the right-hand side is one variable of i or of j. Pass "
                "a tensor (M, E), Vi(b) or Vj(b)."
            )
        value, _, _, cat = lazy._variables[0]
        if self.is_complex and not lazy.is_complex and isinstance(value, Tensor):
            return self._of_category(self._array(with_imaginary_part(value)), None, cat)
        return lazy

    def matvec(self, v: Tensor) -> Tensor:
        """K @ v, for scipy."""
        return self @ v

    def rmatvec(self, v: Tensor) -> Tensor:
        """K.T @ v, for scipy."""
        return self.T @ v


@kept
def _leaf(
    cat: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> tuple[Formula, int, Extent]:
    """Formula, dimension and extent of a tensor of a category."""
    dim = components(cat, shape, dtype)
    return symbolic.leaf(0, dim, cat), dim, extent_of(cat, shape, dtype, device)


def with_imaginary_part(x: Tensor) -> Tensor:
    """The complex numbers x + 0i."""
    return torch.complex(x, torch.zeros_like(x))


def _joined(name: str, a: LazyTensor, b: LazyTensor) -> str:
    return f"{name} joins lazy tensors of shapes {a.shape} and {b.shape}"


def _same_ranges(name: str, a: Any, b: Any) -> Any:
    if a is None or b is None or a is b:
        return b if a is None else a
    pairs = zip(getattr(a, "ranges", a), getattr(b, "ranges", b), strict=True)
    if not all(x is y or (x.shape == y.shape and bool((x == y).all())) for x, y in pairs):
        raise ShapeError(
            f"{name} joins lazy tensors with different ranges: a formula has one mask. Assign the "
            "same ranges to both, or to the result alone."
        )
    return a


def _same_backend(name: str, a: str | None, b: str | None) -> str | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    raise BackendError(
        f"{name} joins lazy tensors with the backends {a!r} and {b!r}: a formula has one. Assign "
        "the same to both, or to the result alone."
    )


_TO_COMPLEX = ("Real2Complex", "Imag2Complex", "ComplexExp1j")
_TO_REAL = ("ComplexReal", "ComplexImag", "ComplexAngle", "ComplexAbs")

LazyTensor.real_class = LazyTensor
