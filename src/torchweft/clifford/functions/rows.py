"""Programs over all batch dimensions as rows, validated once for each signature of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.programs.operator import run
from torchweft.core.operators.call_cache import CallCache, signature

__all__ = ["Validated", "run_rows"]


class Validated(NamedTuple):
    """A call whose arguments are right.

    Args:
        program: its key.
        backend: the one that serves.
        multivectors: (B, batch…, F), of one shape.
        parameters: of the features.
    """

    program: str
    backend: str
    multivectors: Sequence[Tensor]
    parameters: Sequence[Tensor] = ()


_validated: CallCache[tuple[str, str]] = CallCache()
"""The program and the backend of a call, by its signature but for the number of rows."""


def run_rows(
    called: tuple[Any, ...],
    algebra: Algebra,
    blade_dim: int,
    backend: str | None,
    multivectors: Sequence[Tensor],
    parameters: Sequence[Tensor],
    validate: Callable[[], Validated],
    turned: bool = True,
) -> Tensor:
    """The result of a program, with the blades where the caller has them.

    Args:
        called: the operation and its options.
        algebra: of the multivectors.
        blade_dim: 0 or −1.
        backend: the requested one.
        multivectors: the arguments (B, batch…, F), or (batch…, F, B).
        parameters: the arguments (F, P), or (P, F) where they are not `turned`.
        validate: raises, or says what runs; asked at the first call of a signature.
        turned: whether the program takes the parameters as (P, F), a path's side by side.
    """
    key = _signature((*called, backend), algebra, blade_dim, multivectors, parameters)
    found = None if key is None else _validated.get(key)
    if found is None:
        program, chosen, multivectors, parameters = validate()
        if key is not None:
            _validated.keep(key, (program, chosen))
    else:
        program, chosen = found
        if blade_dim:
            multivectors = [x.movedim(-1, 0) for x in multivectors]
    inputs = []
    for x in multivectors:
        dims = x.dim()
        inputs.append(x if dims == 3 else x.unsqueeze(1) if dims == 2 else x.flatten(1, -2))
    for w in parameters:
        inputs.append((w.T if turned else w).contiguous())  # noqa: PERF401
    (z,) = run(program, chosen, *inputs)
    z = z.reshape(z.shape[0], *multivectors[0].shape[1:])
    return z.movedim(0, -1) if blade_dim else z


def _signature(
    called: tuple[Any, ...],
    algebra: Algebra,
    blade_dim: int,
    multivectors: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[Any, ...] | None:
    """All that validation depends on; None where a call must not be cached.

    Multivectors of different shapes, which broadcast, are validated at every call.
    """
    known = signature((*multivectors, *parameters))
    if known is None or type(algebra) is not Algebra or blade_dim not in (0, -1):
        return None
    shape, count = known[0], 3 * len(multivectors)
    if len(shape) < 2 or shape != known[count - 3]:  # there are one or two
        return None
    ends = shape[-2:] if blade_dim else (shape[0], shape[-1])
    shapes = known[count::3]
    return *called, algebra.signature, blade_dim, *ends, shapes, known[1::3], known[2::3]
