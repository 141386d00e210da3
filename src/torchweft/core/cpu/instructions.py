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

__all__ = ["INDEX", "REALS", "Emitter"]

INDEX = ir.IntType(64)

REALS = {"float32": ir.FloatType(), "float64": ir.DoubleType()}

_COMBINED = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}

_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}

Called = Callable[[str, list[Any]], Any]


class Emitter:
    """Writes statements as instructions; LLVM keeps names in registers.

    Args:
        builder: of llvmlite, in the block that the statements begin in.
        real: LLVM's type of the numbers that stand in the text.
        known: integers that the statements read by name.
        called: writes the call of a function of numbers that is not `defined`; None: there are
            none.
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
        self.called, self.flags, self.defined = called, flags, defined or {}
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
        else:
            self._keep(name, value)

    def statements(self, body: list[ast.stmt]) -> None:
        """Write statements, see `straight_line` and `machine_code` for their forms."""
        for statement in body:
            match statement:
                case ast.For(ast.Name(counter), ast.Call(ast.Name("range"), limits), inside):
                    with self._loop(counter, *map(self._index, limits)):
                        self.statements(inside)
                case ast.While(test, inside) | ast.If(test, inside, []):
                    self._branch(test, inside, again=isinstance(statement, ast.While))
                case ast.Assign([ast.Name(name)], value):
                    self._assign(name, value)
                case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                    self._assign_all(targets, values)
                case ast.Assign([ast.Subscript() as element], value):
                    kind = self._element(element)
                    if isinstance(kind, ir.IntType):
                        found = self._index(value)
                        found = found if kind == INDEX else self.builder.trunc(found, kind)
                    else:
                        found = self._converted(self._value(value), kind)
                    self.builder.store(found, self._address(element))
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
        known = {1: (INDEX(0), *limits, INDEX(1)), 2: (*limits, INDEX(1))}
        first, end, step = known.get(len(limits), limits)
        if len(limits) > 1:
            builder.cbranch(builder.icmp_signed("<", first, end), body, after)
        else:
            builder.branch(body)
        builder.position_at_end(body)
        number = builder.phi(INDEX)
        number.add_incoming(first, before)
        self.names.pop(counter, None)
        self.counters[counter] = number
        yield
        following = builder.add(number, step, flags=("nuw", "nsw"))
        number.add_incoming(following, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)
        del self.counters[counter]

    def _branch(self, test: ast.expr, inside: list[ast.stmt], again: bool) -> None:
        """Statements that are run where a test holds, once or as long as it does."""
        builder = self.builder
        begin, body, after = map(builder.append_basic_block, ("test", "body", "after"))
        builder.branch(begin)
        builder.position_at_end(begin)
        self._decide(test, body, after)
        builder.position_at_end(body)
        self.statements(inside)
        builder.branch(begin if again else after)
        builder.position_at_end(after)

    def _decide(self, test: ast.expr, yes: Any, no: Any) -> None:
        """Go on at one of two blocks; of `and` and `or`, what need not be known is not read."""
        match test:
            case ast.BoolOp(operator, [first, *others]) if others:
                following = self.builder.append_basic_block("test")
                both = isinstance(operator, ast.And)
                self._decide(first, *((following, no) if both else (yes, following)))
                self.builder.position_at_end(following)
                self._decide(ast.BoolOp(operator, others), yes, no)
            case ast.BoolOp(_, [last]):
                self._decide(last, yes, no)
            case _:
                self.builder.cbranch(self._comparison(test), yes, no)

    def _comparison(self, test: ast.expr) -> Any:
        match test:
            case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARED:
                sign = _COMPARED[type(operator)]
                if self._is_index(left) or self._is_index(right):
                    return self.builder.icmp_signed(sign, self._index(left), self._index(right))
                ordered, unordered = self.builder.fcmp_ordered, self.builder.fcmp_unordered
                compare = unordered if sign == "!=" else ordered
                return compare(sign, *self._alike(self._value(left), self._value(right)))
        raise _unknown(test)

    def _assign(self, name: str, value: ast.expr) -> None:
        """A name for a number, an integer, or an array of a table of arrays."""
        if name in self.counters:
            raise _unknown(ast.Assign([ast.Name(name)], value, lineno=0))
        if isinstance(value, ast.Subscript) and isinstance(self._element(value), ir.PointerType):
            self.arrays[name] = self.builder.load(self._address(value))
        else:
            self._keep(name, self._index(value) if self._is_index(value) else self._value(value))

    def _assign_all(self, targets: list[ast.expr], values: list[ast.expr]) -> None:
        """Names for numbers, all of which are computed first."""
        numbers = [self._value(value) for value in values]
        for target, number in zip(targets, numbers, strict=True):
            assert isinstance(target, ast.Name)
            self._keep(target.id, number)

    def _keep(self, name: str, value: Any) -> None:
        """A name stands for a value, of the type that it first had."""
        if name not in self.names:
            with self.builder.goto_entry_block():
                self.names[name] = self.builder.alloca(value.type)
        kind = self.names[name].type.pointee
        wider = kind == REALS["float64"] and value.type == REALS["float32"]
        self.builder.store(self._converted(value, kind) if wider else value, self.names[name])

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
                return builder.fneg(self._value(of), flags=self.flags)
            case ast.BinOp(left, operator, right) if type(operator) in _COMBINED:
                both = self._alike(self._value(left), self._value(right))
                return getattr(builder, _COMBINED[type(operator)])(*both, flags=self.flags)
            case ast.IfExp(test, chosen, other) | ast.Call(
                ast.Name("where"), [ast.expr() as test, chosen, other]
            ):
                both = self._alike(self._value(chosen), self._value(other))
                return builder.select(self._comparison(test), *both)
            case ast.Call(ast.Name("float"), [ast.Constant(str() as number)]):
                return self.real(float(number))
            case ast.Call(ast.Name(name), [of]) if name in REALS:
                return self._converted(self._value(of), REALS[name])
            case ast.Call(ast.Name(name), given) if name in self.defined:
                return self._called(self.defined[name], given)
            case ast.Call(ast.Name(name), given) if self.called:
                return self.called(name, [self._value(argument) for argument in given])
        raise _unknown(value)

    def _called(self, function: ast.FunctionDef, given: list[ast.expr]) -> Any:
        """The result of a function, which is written in its place."""
        for argument, value in zip(function.args.args, given, strict=True):
            self._keep(argument.arg, self._value(value))
        *statements, last = function.body
        self.statements(statements)
        assert isinstance(last, ast.Return)
        assert last.value is not None
        return self._value(last.value)

    def _converted(self, value: Any, kind: Any) -> Any:
        """A number in another type."""
        if value.type == kind:
            return value
        wider = kind == REALS["float64"]
        return (self.builder.fpext if wider else self.builder.fptrunc)(value, kind)

    def _alike(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Two numbers, both of 64 bits if one of them is."""
        kind = one.type if one.type == REALS["float64"] else other.type
        return self._converted(one, kind), self._converted(other, kind)

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
                if name in self.names:
                    return bool(self.names[name].type.pointee == INDEX)
                return name in self.counters or name in self.known
            case ast.Subscript():
                return isinstance(self._element(value), ir.IntType)
            case ast.BinOp(left, _, right) | ast.Call(ast.Name("min" | "max"), [left, right]):
                return self._is_index(left) or self._is_index(right)
            case ast.IfExp(_, chosen, other):
                return self._is_index(chosen) or self._is_index(other)
        return False

    def _index(self, index: ast.expr) -> Any:
        builder = self.builder
        match index:
            case ast.Constant(int() as number):
                return INDEX(number)
            case ast.Name(name) if name in self.names:
                return builder.load(self.names[name])
            case ast.Name(name):
                return self.counters[name] if name in self.counters else INDEX(self.known[name])
            case ast.Subscript() if self._is_index(index):
                number = builder.load(self._address(index))
                return number if number.type == INDEX else builder.sext(number, INDEX)
            case ast.BinOp(left, ast.Add() | ast.Mult() as operator, right):
                kinds = {ast.Add: builder.add, ast.Mult: builder.mul}
                combine = kinds[type(operator)]
                return combine(self._index(left), self._index(right), flags=("nuw", "nsw"))
            case ast.BinOp(left, ast.Sub(), right):
                return builder.sub(self._index(left), self._index(right), flags=("nsw",))
            case ast.Call(ast.Name("min" | "max" as name), [left, right]):
                one, other = self._index(left), self._index(right)
                sign = "<" if name == "min" else ">"
                return builder.select(builder.icmp_signed(sign, one, other), one, other)
            case ast.IfExp(test, chosen, other):
                both = self._index(chosen), self._index(other)
                return builder.select(self._comparison(test), *both)
            case ast.BinOp(left, ast.FloorDiv() | ast.Mod() as operator, right):
                divide = builder.udiv if isinstance(operator, ast.FloorDiv) else builder.urem
                return divide(self._index(left), self._index(right))
        raise _unknown(index)


def _unknown(node: ast.AST) -> ValueError:
    return ValueError(
        f"straight-line code holds {ast.unparse(node)!r}, which has none of its forms: "
        "`straight_line` and `machine_code` list them. Print one of these."
    )
