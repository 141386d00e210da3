"""Straight-line arithmetic over arrays inside of numba's functions, without its inference of types.

Loops of hundreds of statements would compile for seconds.  Here a text of assignments and loops
becomes LLVM's instructions directly, inside of the numba function that calls it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from typing import Any

from numba import types
from numba.extending import intrinsic

from torchweft.core.cpu.instructions import Emitter
from torchweft.core.private_compilers import make_array

__all__ = ["straight_line"]


def straight_line(text: str, names: str, known: Mapping[str, Any] | None = None) -> Any:
    """A function for numba's code that runs a text on arrays and numbers.

    Args:
        text: Python of these forms, where each index is made of integers and counters by + and *:
            `name = value`, `array[index] = value`, the same with `+=`, and
            `for counter in range(integer):` of at least one run.  A value is made of numbers,
            names, elements of arrays, calls of functions of numbers, and +, - and *.
        names: those of the arguments, separated by commas.
        known: integers, and functions of numba, that the text reads by name.

    Returns:
        `function(arguments)` of a tuple of an argument for each name: first a C-contiguous array of
        one dimension, whose dtype is that of all numbers, then more of these, integers and numbers.
        Arrays should not share memory.

    Example:
        >>> import numba
        >>> import numpy as np
        >>> square = straight_line("for u in range(n): y[u] = x[u] * x[u] + 1.0", "x, y, n")
        >>> @numba.njit
        ... def run(x, y):
        ...     square((x, y, len(x)))
        >>> x, y = np.arange(3.0), np.zeros(3)
        >>> run(x, y)
        >>> y
        array([1., 2., 5.])
    """
    body, order, known = ast.parse(text).body, names.split(", "), known or {}

    @intrinsic
    def function(typingctx, arguments):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            dtype = signature.args[0][0].dtype

            def called(name: str, given: list[Any]) -> Any:
                typing = context.typing_context
                function = typing.resolve_value_type(known.get(name) or getattr(builtins, name))
                kinds = typing.resolve_function_type(function, (dtype,) * len(given), {})
                return context.get_function(function, kinds)(builder, given)

            emitter = Emitter(builder, context.get_value_type(dtype), known, called)
            for i, (name, kind) in enumerate(zip(order, signature.args[0], strict=True)):
                value = builder.extract_value(args[0], i)
                if isinstance(kind, types.Array):
                    value = make_array(kind)(context, builder, value).data
                emitter.give(name, value)
            emitter.statements(body)
            return context.get_dummy_value()

        return types.none(arguments), generate

    return function
