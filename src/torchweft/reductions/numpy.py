"""The public names for NumPy's arrays, which share memory with torch; results are arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Unpack

import numpy as np
from torch import Tensor

from torchweft.reductions import genred, lazy, solve
from torchweft.reductions.arrays import arrays, tensors
from torchweft.reductions.cluster import arrays as cluster
from torchweft.reductions.generic import generic
from torchweft.reductions.keywords import GenredKeywords, Keywords
from torchweft.reductions.solve import SolveKeywords

__all__ = [
    "ComplexLazyTensor",
    "Genred",
    "KernelSolve",
    "LazyTensor",
    "Pm",
    "Var",
    "Vi",
    "Vj",
    "cluster",
    "generic_argkmin",
    "generic_argmin",
    "generic_logsumexp",
    "generic_sum",
]


Array: TypeAlias = np.ndarray[Any, Any]
Data: TypeAlias = Array | complex | list[Any] | tuple[int, int, int]
"""What a lazy tensor is made of: an array, numbers, or (index, dim, category) of a symbol."""


class LazyTensor(lazy.LazyTensor):
    """f(x_i, y_j, p) for all pairs, of NumPy's arrays; results are arrays.

    Args:
        x: as for `torchweft.reductions.LazyTensor`, with arrays for tensors.
        axis: of an array of two dimensions: 0 varies with i, 1 with j.
        is_complex: whether to return a ComplexLazyTensor.

    Raises:
        ShapeError: x has no shape of a variable, see above.
        DTypeError: x holds neither real nor complex floating-point numbers.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import LazyTensor
        >>> x = np.array([[0.0], [1.0]])
        >>> (LazyTensor(x[:, None]) - LazyTensor(x[None])).abs().sum(1)
        array([[1.],
               [1.]])
    """

    real_class: ClassVar[type[LazyTensor]]
    complex_class: ClassVar[type[ComplexLazyTensor]]

    if TYPE_CHECKING:  # the methods whose types name tensors

        def __init__(
            self, x: Data | None = None, axis: int | None = None, is_complex: bool = False
        ) -> None: ...
        def __matmul__(self, v: Array, **options: Unpack[Keywords]) -> Array: ...  # type: ignore[override]
        def matvec(self, v: Array) -> Array:  # type: ignore[override]
            """K @ v."""

        def rmatvec(self, v: Array) -> Array:  # type: ignore[override]
            """K.T @ v."""

        def solve(  # type: ignore[override]
            self,
            other: Array | LazyTensor,
            var: LazyTensor | None = None,
            call: bool = True,
            alpha: float | None = None,
            eps: float = 1e-6,
            **options: Unpack[SolveKeywords],
        ) -> Array:
            """a with (α + K) a = b."""

    @classmethod
    def _tensor(cls, x: Any) -> Any:
        return tensors(x)

    @classmethod
    def _array(cls, x: Tensor) -> Array:  # type: ignore[override]
        return arrays(x)  # type: ignore[no-any-return]

    @classmethod
    def _is_complex_data(cls, x: Any) -> bool:
        return super()._is_complex_data(tensors(x))


class ComplexLazyTensor(LazyTensor, lazy.ComplexLazyTensor):  # type: ignore[misc]
    """Complex f(x_i, y_j, p) for all pairs, of NumPy's arrays; results are arrays.

    Args:
        x: as for `torchweft.reductions.ComplexLazyTensor`, with arrays for tensors.
        axis: of an array of two dimensions: 0 varies with i, 1 with j.
        is_complex: without effect.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import ComplexLazyTensor
        >>> z = np.array([[1j], [2.0]])
        >>> ComplexLazyTensor(z[:, None]).sum(0)
        array([[2.+1.j]])
    """


LazyTensor.real_class = LazyTensor
LazyTensor.complex_class = ComplexLazyTensor


class Genred(genred.Genred):
    """`torchweft.reductions.Genred` of NumPy's arrays; results are arrays.

    Args:
        formula, aliases, reduction_op, axis, dtype, opt_arg, formula2, cuda_type: as there.
        dtype_acc, use_double_acc, sum_scheme, enable_chunks, rec_multVar_highdim: as there.
        use_fast_math, precision: as there.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import Genred
        >>> nearest = Genred("SqDist(x, y)", ["x = Vi(1)", "y = Vj(1)"], "ArgMin", axis=1)
        >>> nearest(np.array([[0.0], [9.0]]), np.array([[1.0], [5.0], [8.0]]))
        array([[0],
               [2]])
    """

    _tensor, _array = staticmethod(tensors), staticmethod(arrays)

    if TYPE_CHECKING:

        def __call__(  # type: ignore[override]
            self,
            *args: Array,
            backend: str | None = "auto",
            device_id: int = -1,
            ranges: Any = None,
            out: Array | None = None,
        ) -> Array:
            """The reduction of these arrays."""


class KernelSolve(solve.KernelSolve):
    """`torchweft.reductions.KernelSolve` of NumPy's arrays; results are arrays.

    Args:
        formula, aliases, varinvalias, axis, options: as there.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import KernelSolve
        >>> aliases = ["x = Vi(1)", "y = Vj(1)", "a = Vj(1)"]
        >>> system = KernelSolve("Exp(-SqDist(x, y)) * a", aliases, "a", axis=1)
        >>> x = np.array([[0.0], [9.0]])
        >>> system(x, x, np.array([[2.0], [4.0]]), alpha=1.0).round(3)
        array([[1.],
               [2.]])
    """

    def __call__(self, *args: Array, **options: Any) -> Array:  # type: ignore[override]
        """The solution, see `torchweft.reductions.KernelSolve`, as an array."""
        given = {name: tensors(value) for name, value in options.items()}
        return arrays(super().__call__(*tensors(args), **given))  # type: ignore[no-any-return]


def generic_sum(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """Σ f: `torchweft.reductions.generic_sum` of NumPy's arrays.

    Args:
        formula: as there.
        output: as there.
        aliases: as there.
        options: as there.

    Returns:
        The `Genred`: a function of one array for each variable.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import generic_sum
        >>> reduction = generic_sum("x * y", "a = Vi(1)", "x = Vi(1)", "y = Vj(1)")
        >>> reduction(np.array([[2.0]]), np.array([[3.0], [4.0]]))
        array([[14.]])
    """
    return generic(Genred, "Sum", formula, output, aliases, options)


def generic_logsumexp(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """log Σ exp(f): `torchweft.reductions.generic_logsumexp` of NumPy's arrays.

    Args:
        formula: as there.
        output: as there.
        aliases: as there.
        options: as there.

    Returns:
        The `Genred`: a function of one array for each variable.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import generic_logsumexp
        >>> reduction = generic_logsumexp("x * y", "a = Vi(1)", "x = Vi(1)", "y = Vj(1)")
        >>> reduction(np.array([[0.0]]), np.array([[3.0]]))
        array([[0.]])
    """
    return generic(Genred, "LogSumExp", formula, output, aliases, options)


def generic_argmin(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """The index of the smallest f: `torchweft.reductions.generic_argmin` of NumPy's arrays.

    Args:
        formula: as there.
        output: as there.
        aliases: as there.
        options: as there.

    Returns:
        The `Genred`: a function of one array for each variable.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import generic_argmin
        >>> reduction = generic_argmin("x * y", "a = Vi(1)", "x = Vi(1)", "y = Vj(1)")
        >>> reduction(np.array([[2.0]]), np.array([[4.0], [3.0]]))
        array([[1]])
    """
    return generic(Genred, "ArgMin", formula, output, aliases, options)


def generic_argkmin(
    formula: str, output: str, *aliases: str, **options: Unpack[GenredKeywords]
) -> Genred:
    """The indices of the K smallest f: `torchweft.reductions.generic_argkmin` of NumPy's arrays.

    Args:
        formula: as there.
        output: as there.
        aliases: as there.
        options: as there.

    Returns:
        The `Genred`: a function of one array for each variable.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import generic_argkmin
        >>> reduction = generic_argkmin("x * y", "a = Vi(2)", "x = Vi(1)", "y = Vj(1)")
        >>> reduction(np.array([[2.0]]), np.array([[4.0], [3.0]]))
        array([[1, 0]])
    """
    return generic(Genred, "ArgKMin", formula, output, aliases, options)


def Var(x_or_ind: Data, dim: int | None = None, cat: int | None = None) -> LazyTensor:  # noqa: N802
    """`torchweft.reductions.Var` of NumPy's arrays.

    Args:
        x_or_ind: as there, with an array for a tensor.
        dim: as there.
        cat: as there.

    Returns:
        The lazy tensor of arrays.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import Var
        >>> Var(np.zeros((5, 3)), cat=0).shape
        (5, 1, 3)
    """
    return LazyTensor._of_category(x_or_ind, dim, cat)  # type: ignore[return-value]


def Vi(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """`torchweft.reductions.Vi` of NumPy's arrays.

    Args:
        x_or_ind: as there, with an array for a tensor.
        dim: as there.

    Returns:
        The lazy tensor of arrays.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import Vi
        >>> Vi(np.zeros((5, 3))).shape
        (5, 1, 3)
    """
    return Var(x_or_ind, dim, 0)


def Vj(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """`torchweft.reductions.Vj` of NumPy's arrays.

    Args:
        x_or_ind: as there, with an array for a tensor.
        dim: as there.

    Returns:
        The lazy tensor of arrays.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import Vj
        >>> Vj(np.zeros((5, 3))).shape
        (1, 5, 3)
    """
    return Var(x_or_ind, dim, 1)


def Pm(x_or_ind: Data, dim: int | None = None) -> LazyTensor:  # noqa: N802
    """`torchweft.reductions.Pm` of NumPy's arrays.

    Args:
        x_or_ind: as there, with an array for a tensor.
        dim: as there.

    Returns:
        The lazy tensor of arrays.

    Example:
        >>> import numpy as np
        >>> from torchweft.reductions.numpy import Pm
        >>> Pm(np.array([0.5])).shape
        (1, 1)
    """
    return Var(x_or_ind, dim, 2)
