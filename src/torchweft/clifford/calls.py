"""Calls of functions of multivectors: validated once a signature, computed over batches as rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.programs.operator import bound
from torchweft.clifford.programs.programs import key
from torchweft.core.backend import choose
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import check_tensors, narrowed, same_kind
from torchweft.core.operators.operator import constant_when_compiling
from torchweft.errors import BackendError, DTypeError, ShapeError

__all__ = [
    "LARGEST_DIMENSION",
    "RowFunction",
    "backend_for",
    "backend_on",
    "blades_first",
    "check_algebra",
    "norm_words",
    "program_rows",
]

LARGEST_DIMENSION = 5
"""Basis vectors up to which code is generated; larger algebras run on the torch path."""

NORMS = ("euclidean", "metric")

Compute = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


class RowFunction:
    """A function of multivectors (B, batch…, F) that treats all positions of the batch alike.

    Args:
        prepare: `(algebra, backend, *options) -> compute`, and `compute(multivectors, parameters)`
            is the result (B', rows, F') of multivectors (B, rows, F).
        multivectors: their names.
        parameters: the dimensions of each parameter by its name, as in weight="F P"; a dimension
            F_out may have any length, and a parameter without dimensions is not checked.
        cast: of each tensor under autocast.
    """

    def __init__(
        self,
        prepare: Callable[..., Compute],
        multivectors: Sequence[str],
        cast: Callable[[Tensor], Tensor] = narrowed,
        **parameters: str,
    ) -> None:
        self._cast = cast
        self._prepare, self._multivectors, self._parameters = prepare, multivectors, parameters
        self._calls: CallCache[Compute] = CallCache()

    def __call__(
        self,
        tensors: Sequence[Tensor | None],
        algebra: Algebra,
        blade_dim: int,
        backend: str | None,
        *options: Any,
    ) -> Tensor:
        """The result (B', batch…, F'), or (batch…, F', B') with blade_dim -1.

        Args:
            tensors: the multivectors, then the parameters; the last of these may be None.
            algebra: the algebra of the multivectors.
            blade_dim: 0 or −1.
            backend: the requested one.
            options: what else the result depends on.
        """
        count = len(self._multivectors)
        without = tensors[-1] is None and len(tensors) > count
        given: Any = tensors[:-1] if without else tensors
        multivectors, parameters = given[:count], given[count:]
        known = _signature(given, count, algebra, blade_dim)
        called = (known, backend, options)
        compute = None if known is None else self._calls.get(called)
        if compute is None:
            multivectors, parameters = self._validated(given, algebra, blade_dim)
            compute = self._prepare(algebra, backend_for(backend, algebra, multivectors), *options)
            if known is not None:
                self._calls.keep(called, compute)
        elif blade_dim:
            multivectors = [x.movedim(-1, 0) for x in multivectors]
        rows = []
        for x in multivectors:
            dims = x.dim()
            rows.append(x if dims == 3 else x.unsqueeze(1) if dims == 2 else x.flatten(1, -2))
        z = compute(rows, parameters)
        shape = multivectors[0].shape
        if len(shape) != 3:
            z = z.reshape(z.shape[0], *shape[1:-1], z.shape[-1])
        return z.movedim(0, -1) if blade_dim else z

    def _validated(
        self, given: Sequence[Tensor], algebra: Algebra, blade_dim: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The multivectors (B, batch…, F) of one shape, and the parameters, all of one dtype."""
        check_algebra(algebra)
        count, names = len(self._multivectors), (*self._multivectors, *self._parameters)
        named = dict(zip(names, given, strict=False))
        check_tensors(**named)  # None too is no tensor
        tensors = same_kind(self._cast, **named)
        named = dict(zip(names[:count], tensors, strict=False))
        multivectors, parameters = blades_first(algebra, blade_dim, **named), tensors[count:]
        multivectors = _broadcast(names, multivectors)
        features = multivectors[0].shape[-1]
        lengths = {"n+1": algebra.n + 1, "1": 1, "F": features, "F_in": features, "F_out": None}
        for (name, dims), parameter in zip(self._parameters.items(), parameters, strict=False):
            if name.endswith("bias") and dims:
                _check_bias(parameter, parameters[0].shape[-1])
            elif dims:
                _check_weight(
                    parameter,
                    [(d, len(algebra.paths) if d == "P" else lengths[d]) for d in dims.split(" ")],
                )
        return multivectors, parameters


def _signature(
    tensors: Sequence[Tensor], multivectors: int, algebra: Algebra, blade_dim: int
) -> tuple[Any, ...] | None:
    """All that validation depends on; None where a call must not be cached.

    The number of rows is no part of it.  Multivectors of different shapes, which broadcast, are
    validated at every call.
    """
    known = signature(tensors)
    if known is None or type(algebra) is not Algebra or blade_dim not in (0, -1):
        return None
    shape, count = known[0], 3 * multivectors
    if len(shape) < 2 or known[:count:3].count(shape) != multivectors:
        return None
    ends = shape[-2:] if blade_dim else (shape[0], shape[-1])
    return algebra.signature, blade_dim, *ends, known[count::3], known[1::3], known[2::3]


def program_rows(
    builder: str,
    words: Callable[..., Sequence[object]] = lambda algebra, *options: options,
    *,
    transposed: bool = False,
) -> Callable[..., Compute]:
    """The `prepare` of a RowFunction that is one program.

    Args:
        builder: the name of the program's builder.
        words: `(algebra, *options) -> words` of its key.
        transposed: whether the program takes the transposed parameters.
    """

    def prepare(algebra: Algebra, backend: str, *options: Any) -> Compute:
        run = bound(key(builder, algebra, *words(algebra, *options)), backend)

        def compute(multivectors: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
            inputs = list(multivectors)
            for w in parameters:
                inputs.append((w.T if transposed else w).contiguous())  # noqa: PERF401
            return run(inputs)[0]

        return compute

    return prepare


def check_algebra(algebra: object) -> None:
    """Raise DTypeError unless it is an Algebra."""
    if not isinstance(algebra, Algebra):
        raise DTypeError(
            f"algebra is a {type(algebra).__name__}: it must be a torchweft.clifford.Algebra. Pass "
            "Algebra.cl(p, q, r) or Algebra(metric), or correct the order of the arguments: "
            "algebra=… finds its place."
        )


def blades_first(algebra: Algebra, blade_dim: int, **multivectors: Tensor) -> list[Tensor]:
    """Views (B, rows…, F) of multivectors with blades along dimension 0 or −1."""
    check_algebra(algebra)
    if blade_dim not in (0, -1):
        raise ShapeError(
            f"blade_dim is {blade_dim}: it must be 0 for (B, batch…, F) or -1 for (batch…, F, B)."
        )
    for name, x in multivectors.items():
        if x.dim() < 2 or x.shape[blade_dim] != algebra.num_blades:
            layout = "(B, batch…, F)" if blade_dim == 0 else "(batch…, F, B)"
            raise ShapeError(
                f"{name} is {tuple(x.shape)}: it must be {layout} with B = {algebra.num_blades} "
                f"blades along dimension {blade_dim}, as {algebra} has. Pass all blades, or the "
                f"other blade_dim."
            )
    return [x.movedim(blade_dim, 0) for x in multivectors.values()]


def _broadcast(names: Sequence[str], multivectors: list[Tensor]) -> list[Tensor]:
    """The multivectors in one shape: a dimension of length 1 meets any length."""
    first, *others = multivectors
    if all(x.shape == first.shape for x in others):
        return multivectors
    for name, other in zip(names[1:], others, strict=False):
        pairs = zip(first.shape, other.shape, strict=False)
        if first.dim() != other.dim() or any(a != b and 1 not in (a, b) for a, b in pairs):
            raise ShapeError(
                f"{names[0]} is {tuple(first.shape)} and {name} is {tuple(other.shape)}, blades "
                "first: batch dimensions and features must be equal or 1. Pass as many of each, "
                "with 1 where one serves all."
            )
    return list(torch.broadcast_tensors(*multivectors))  # type: ignore[no-untyped-call]


def _check_weight(weight: Tensor, needed: Sequence[tuple[str, int | None]]) -> None:
    """Raise unless the dimensions have the lengths needed; None is any length."""
    pairs = zip(weight.shape, needed, strict=False)
    if weight.dim() != len(needed) or any(n is not None and n != size for size, (_, n) in pairs):
        shape = ", ".join(dim if length is None else f"{dim} = {length}" for dim, length in needed)
        raise ShapeError(
            f"weight is {tuple(weight.shape)}: it must be ({shape}), P the paths of the algebra in "
            "the order of algebra.paths. Transpose it, or give it one entry a path and feature."
        )


def _check_bias(bias: Tensor, length: int) -> None:
    if bias.shape != (length,):
        raise ShapeError(
            f"bias is {tuple(bias.shape)}: it must be ({length},), a number for the scalar of "
            "each feature that the weight gives. Pass that many, or None."
        )


def norm_words(
    algebra: Algebra, normalize: bool, norm: str = "euclidean", eps: float = 1e-6
) -> tuple[str, ...]:
    """The words of the norm that ends a program; none without a norm."""
    if not normalize:
        return ()
    if norm not in NORMS:
        raise ShapeError(
            f"norm is {norm!r}: it must be one of {NORMS}. Use 'metric' where the metric is not "
            "definite, to be invariant under its boosts and translations."
        )
    return norm, eps.hex()


def backend_for(backend: str | None, algebra: Algebra, tensors: Sequence[Tensor]) -> str:
    """The backend that serves the call; algebras of many dimensions are the torch path's."""
    if algebra.n <= LARGEST_DIMENSION:
        return backend_on(backend, tensors[0].device.type)
    if backend in (None, "torch"):
        return "torch"
    raise BackendError(
        f"backend={backend!r} was asked for with n = {algebra.n} basis vectors: kernels are "
        f"generated up to n = {LARGEST_DIMENSION}. Pass backend=None or 'torch'."
    )


@constant_when_compiling
def backend_on(backend: str | None, device: str) -> str:
    """The backend that serves tensors on a device."""
    return choose(backend, device)
