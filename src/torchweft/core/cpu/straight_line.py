"""Straight-line arithmetic over arrays, compiled without numba's inference of types.

numba spends some milliseconds on each statement, most of them on what is known beforehand: that all
numbers have one dtype, and all indices are integers.  Loops of hundreds of statements would compile
for seconds.  Here a text of assignments and loops becomes LLVM's instructions directly, inside of
the numba function that calls it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from torchweft.core.private_compilers import make_array

__all__ = ["straight_line"]

_INDEX = ir.IntType(64)


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
    body, order = ast.parse(text).body, names.split(", ")

    @intrinsic
    def function(typingctx, arguments):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            emitter = _Emitter(context, builder, signature.args[0][0].dtype, known or {})
            for i, (name, kind) in enumerate(zip(order, signature.args[0], strict=True)):
                emitter.give(name, kind, builder.extract_value(args[0], i))
            emitter.statements(body)
            return context.get_dummy_value()

        return types.none(arguments), generate

    return function


class _Emitter:
    """Writes statements as instructions; LLVM keeps names in registers."""

    def __init__(self, context: Any, builder: Any, dtype: Any, known: Mapping[str, Any]) -> None:
        self.context, self.builder, self.dtype, self.known = context, builder, dtype, known
        self.real = context.get_value_type(dtype)
        self.arrays: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}

    def give(self, name: str, kind: Any, value: Any) -> None:
        """An argument of numba's type `kind`."""
        if isinstance(kind, types.Array):
            self.arrays[name] = make_array(kind)(self.context, self.builder, value).data
        elif isinstance(kind, types.Integer):
            self.counters[name] = value
        else:
            self.builder.store(value, self._room(name))

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.For(ast.Name(counter), ast.Call(args=[count]), inside):
                    with self._loop(counter, self._index(count)):
                        self.statements(inside)
                case ast.Assign([ast.Name(name)], value):
                    self.builder.store(self._value(value), self._room(name))
                case ast.Assign([ast.Subscript() as element], value):
                    self.builder.store(self._value(value), self._address(element))
                case ast.AugAssign(target, operator, value):
                    self.statements([ast.Assign([target], ast.BinOp(target, operator, value))])
                case _:
                    raise _unknown(statement)

    @contextmanager
    def _loop(self, counter: str, count: Any) -> Iterator[None]:
        """A loop whose body is written meanwhile; it runs at least once."""
        builder = self.builder
        before, body = builder.block, builder.append_basic_block("loop")
        builder.branch(body)
        builder.position_at_end(body)
        number = builder.phi(_INDEX)
        number.add_incoming(_INDEX(0), before)
        self.counters[counter] = number
        yield
        following = builder.add(number, _INDEX(1), flags=("nuw", "nsw"))
        number.add_incoming(following, builder.block)
        after = builder.append_basic_block("after")
        builder.cbranch(builder.icmp_unsigned("<", following, count), body, after)
        builder.position_at_end(after)

    def _room(self, name: str) -> Any:
        if name not in self.names:
            with self.builder.goto_entry_block():
                self.names[name] = self.builder.alloca(self.real)
        return self.names[name]

    def _value(self, value: ast.expr) -> Any:
        builder = self.builder
        match value:
            case ast.Constant(float() | int() as number):
                return self.real(float(number))
            case ast.Name(name):
                return builder.load(self.names[name])
            case ast.Subscript():
                return builder.load(self._address(value))
            case ast.UnaryOp(ast.USub(), of):
                return builder.fneg(self._value(of))
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() as operator, right):
                kinds = {ast.Add: builder.fadd, ast.Sub: builder.fsub, ast.Mult: builder.fmul}
                return kinds[type(operator)](self._value(left), self._value(right))
            case ast.Call(ast.Name(name), given):
                return self._called(name, [self._value(argument) for argument in given])
        raise _unknown(value)

    def _called(self, name: str, given: list[Any]) -> Any:
        typing = self.context.typing_context
        function = typing.resolve_value_type(self.known.get(name) or getattr(builtins, name))
        signature = typing.resolve_function_type(function, (self.dtype,) * len(given), {})
        return self.context.get_function(function, signature)(self.builder, given)

    def _address(self, element: ast.Subscript) -> Any:
        assert isinstance(element.value, ast.Name)
        array = self.arrays[element.value.id]
        return self.builder.gep(array, [self._index(element.slice)], inbounds=True)

    def _index(self, index: ast.expr) -> Any:
        match index:
            case ast.Constant(number):
                return _INDEX(number)
            case ast.Name(name):
                return self.counters[name] if name in self.counters else _INDEX(self.known[name])
            case ast.BinOp(left, ast.Add() | ast.Mult() as operator, right):
                kinds = {ast.Add: self.builder.add, ast.Mult: self.builder.mul}
                combine = kinds[type(operator)]
                return combine(self._index(left), self._index(right), flags=("nuw", "nsw"))
        raise _unknown(index)


def _unknown(node: ast.AST) -> ValueError:
    return ValueError(
        f"straight-line code holds {ast.unparse(node)!r}: see `straight_line` for the forms that "
        "it may have. Print one of these, or leave the statement to numba."
    )
