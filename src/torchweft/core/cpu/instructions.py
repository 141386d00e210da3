"""Assignments and loops over arrays, written as LLVM's instructions.

numba spends some milliseconds on each statement, most of them on what is known beforehand: that all
numbers have one dtype, and all indices are integers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

__all__ = ["INDEX", "Emitter"]

INDEX = ir.IntType(64)

Called = Callable[[str, list[Any]], Any]

OF_LLVM = ("sqrt", "sin", "cos", "exp")
"""Functions of a number that LLVM knows; the C library has those that no instruction computes."""


class Emitter:
    """Writes statements as instructions; LLVM keeps names in registers.

    Args:
        builder: of llvmlite, in the block that the statements begin in.
        real: LLVM's type of all numbers.
        known: integers that the statements read by name.
        called: writes the call of a function of numbers; None: `defined`, and those of LLVM.
        flags: of LLVM, for arithmetic on numbers.
        defined: functions of numbers: assignments, then a return.  They share the statements'
            names, so theirs are to be others.
    """

    def __init__(
        self,
        builder: Any,
        real: Any,
        known: Mapping[str, Any] | None = None,
        called: Called | None = None,
        flags: tuple[str, ...] = (),
        defined: Mapping[str, ast.FunctionDef] | None = None,
    ) -> None:
        self.builder, self.real, self.known = builder, real, known or {}
        self.called, self.flags, self.defined = called or self._called, flags, defined or {}
        self.arrays: dict[str, Any] = {}
        self.widths: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}

    def give(self, name: str, value: Any, width: Any = None) -> None:
        """A name that statements read.

        Args:
            name: in the statements.
            value: a number, an integer of 64 bits, or a pointer to the elements of an array.
            width: numbers in a row of an array of two dimensions.
        """
        if isinstance(value.type, ir.PointerType):
            self.arrays[name] = value
            if width is not None:
                self.widths[name] = width
        elif isinstance(value.type, ir.IntType):
            self.counters[name] = value
        else:
            self.builder.store(value, self._room(name))

    def statements(self, body: list[ast.stmt]) -> None:
        """Write statements, see `straight_line` and `machine_code` for their forms."""
        for statement in body:
            match statement:
                case ast.For(ast.Name(counter), ast.Call(ast.Name("range"), limits), inside):
                    with self._loop(counter, *map(self._index, limits)):
                        self.statements(inside)
                case ast.Assign([ast.Name(name)], value):
                    self._assign(name, value)
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                    self._assign_all(targets, values)
                case ast.Assign([ast.Subscript() as element], value):
                    number, place = self._value(value), self._address(element)
                    if number.type != place.type.pointee:
                        number = self.builder.fptrunc(number, place.type.pointee)
                    self.builder.store(number, place)
                case ast.AugAssign(target, operator, value):
                    self.statements([ast.Assign([target], ast.BinOp(target, operator, value))])
                case _:
                    raise _unknown(statement)

    @contextmanager
    def _loop(self, counter: str, *limits: Any) -> Iterator[None]:
        """A loop whose body is written meanwhile; with one limit it runs at least once."""
        builder = self.builder
        before, body = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        first, end = limits if len(limits) == 2 else (INDEX(0), *limits)
        if len(limits) == 2:
            builder.cbranch(builder.icmp_signed("<", first, end), body, after)
        else:
            builder.branch(body)
        builder.position_at_end(body)
        number = builder.phi(INDEX)
        number.add_incoming(first, before)
        self.counters[counter] = number
        yield
        following = builder.add(number, INDEX(1), flags=("nuw", "nsw"))
        number.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)

    def _assign(self, name: str, value: ast.expr) -> None:
        """A name for a number, an integer, or an array of a table of arrays."""
        if isinstance(value, ast.Subscript) and isinstance(self._element(value), ir.PointerType):
            self.arrays[name] = self.builder.load(self._address(value))
        elif self._is_index(value):
            self.counters[name] = self._index(value)
        else:
            self.builder.store(self._value(value), self._room(name))

    def _assign_all(self, targets: list[ast.expr], values: list[ast.expr]) -> None:
        """Names for numbers, all of which are computed first."""
        numbers = [self._value(value) for value in values]
        for target, number in zip(targets, numbers, strict=True):
            assert isinstance(target, ast.Name)
            self.builder.store(number, self._room(target.id))

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
                number = builder.load(self._address(value))
                return number if number.type == self.real else builder.fpext(number, self.real)
            case ast.UnaryOp(ast.USub(), of):
                return builder.fneg(self._value(of), flags=self.flags)
            case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operator, right):
                kinds = {ast.Add: builder.fadd, ast.Sub: builder.fsub, ast.Mult: builder.fmul}
                combine = kinds.get(type(operator), builder.fdiv)
                return combine(self._value(left), self._value(right), flags=self.flags)
            case ast.Call(ast.Name("where"), [ast.Compare(left, [operator], [right]), *values]):
                compared = {ast.Lt: "<", ast.Gt: ">", ast.Eq: "=="}[type(operator)]
                chosen = builder.fcmp_ordered(compared, self._value(left), self._value(right))
                return builder.select(chosen, *map(self._value, values))
            case ast.Call(ast.Name(name), given):
                return self.called(name, [self._value(argument) for argument in given])
        raise _unknown(value)

    def _called(self, name: str, given: list[Any]) -> Any:
        """The result of a function of `defined`, written in its place, or of LLVM."""
        if name in OF_LLVM:
            function = self.builder.module.declare_intrinsic(f"llvm.{name}", [self.real])
            return self.builder.call(function, given, fastmath=self.flags)
        if name not in self.defined:
            raise _unknown(ast.Name(name))
        function = self.defined[name]
        for argument, number in zip(function.args.args, given, strict=True):
            self.builder.store(number, self._room(argument.arg))
        *statements, last = function.body
        self.statements(statements)
        assert isinstance(last, ast.Return)
        assert last.value is not None
        return self._value(last.value)

    def _element(self, element: ast.Subscript) -> Any:
        """LLVM's type of an element."""
        assert isinstance(element.value, ast.Name)
        return self.arrays[element.value.id].type.pointee

    def _address(self, element: ast.Subscript) -> Any:
        assert isinstance(element.value, ast.Name)
        name, builder = element.value.id, self.builder
        array = self.arrays[name]
        match element.slice:
            case ast.Tuple([row, place]):
                begin = builder.mul(self._index(row), self.widths[name], flags=("nuw", "nsw"))
                array = builder.gep(array, [begin], inbounds=True)
            case place:
                pass
        return builder.gep(array, [self._index(place)], inbounds=True)

    def _is_index(self, value: ast.expr) -> bool:
        match value:
            case ast.Name(name):
                return name in self.counters or name in self.known
            case ast.Subscript():
                return isinstance(self._element(value), ir.IntType)
            case ast.BinOp(left, _, right):
                return self._is_index(left) or self._is_index(right)
        return False

    def _index(self, index: ast.expr) -> Any:
        builder = self.builder
        match index:
            case ast.Constant(int() as number):
                return INDEX(number)
            case ast.Name(name):
                return self.counters[name] if name in self.counters else INDEX(self.known[name])
            case ast.Subscript() if self._is_index(index):
                number = builder.load(self._address(index))
                return number if number.type == INDEX else builder.sext(number, INDEX)
            case ast.BinOp(left, ast.Add() | ast.Mult() as operator, right):
                kinds = {ast.Add: builder.add, ast.Mult: builder.mul}
                combine = kinds[type(operator)]
                return combine(self._index(left), self._index(right), flags=("nuw", "nsw"))
            case ast.BinOp(left, ast.FloorDiv() | ast.Mod() as operator, right):
                divide = builder.udiv if isinstance(operator, ast.FloorDiv) else builder.urem
                return divide(self._index(left), self._index(right))
        raise _unknown(index)


def _unknown(node: ast.AST) -> ValueError:
    return ValueError(
        f"straight-line code holds {ast.unparse(node)!r}, which has none of its forms: "
        "`straight_line` and `machine_code` list them. Print one of these."
    )
