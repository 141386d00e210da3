"""Functions on arrays as machine code: their text becomes LLVM's instructions, kept on disk.

numba would take five times as long, most of it for its inference of types and for functions around
the code; it need not even be imported, only llvmlite, which it is built on.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import torch
from llvmlite import ir

from torchweft.core.cpu import functions, instructions
from torchweft.core.cpu.functions import FLAGS
from torchweft.core.cpu.instructions import INDEX, REALS, Emitter
from torchweft.core.files import keep_code, kept_code, source_hash
from torchweft.errors import DTypeError

__all__ = ["machine_code"]

_TYPES = {"int32": ir.IntType(32), "int64": INDEX, **REALS}


class _Kind(NamedTuple):
    """What an argument is: the dtype, and "", "[:]", "[:, :]" or "[:][:]" behind it."""

    dtype: str
    shape: str

    @property
    def types(self) -> list[Any]:
        """LLVM's types of what is passed for it."""
        pointers = {"": 0, "[:][:]": 2}.get(self.shape, 1)
        passed = _TYPES[self.dtype]
        for _ in range(pointers):
            passed = passed.as_pointer()
        return [passed, INDEX] if self.shape == "[:, :]" else [passed]

    @property
    def needed(self) -> tuple[torch.dtype, int]:
        """Dtype and number of dimensions of the tensor that is given for it; 0: an integer."""
        dtype = "int64" if self.shape == "[:][:]" else self.dtype
        return getattr(torch, dtype), bool(self.shape) + (self.shape == "[:, :]")


@functools.cache
def machine_code(
    text: str, flags: tuple[str, ...] = FLAGS, wide: bool = False
) -> Callable[..., None]:
    """The function that a text defines.

    Args:
        text: a function of Python.  Each argument has a kind: `int64`; `dtype[:]` or `dtype[:, :]`
            for tensors of int32, int64, float32 or float64; `dtype[:][:]` for an int64 tensor of
            the addresses of such tensors.  Statements are `name = value`, `array[index] = value`,
            the same with `+=`, `a, b = of_a, of_b` for numbers, `for counter in range(integer):` of
            at least one run, `range(first, end)` or `range(first, end, step)`, `while test:`, and
            `if test:` without an else.
            A test compares two values, or is made of tests by `and` and `or`.  A value is a number,
            an integer, or an array of a table; they are made of names, elements, +, - and *,
            numbers of /, of `one if test else other` or `where(test, one, other)` with one
            comparison, of `FUNCTIONS`, and of functions that the text defines before: assignments,
            then a return, with names of their own; integers of min and max, of `one if test else
            other`, and of // and % where none is negative; sums of integers are not negative.  The
            indices of an array with two dimensions are `row, place`.
            Numbers that stand in the text are of float32 where an argument is; with one of float64
            they give one of float64, which `float32(value)` and elements of arrays round.
        flags: of LLVM, for arithmetic on numbers.
        wide: numbers that stand in the text are of float64, whatever the arguments are.

    Returns:
        A function of integers and contiguous tensors, which releases Python's lock.  It does not
        check indices; tensors that it writes share memory with no other argument.

    Raises:
        DTypeError: by the function: a tensor is not of the kind in the text.
        ValueError: the text has another form.

    Example:
        >>> import torch
        >>> add = machine_code('''
        ... def add(x: float64[:, :], rows: int64[:], first: int64, end: int64, y: float64[:]):
        ...     for n in range(first, end):
        ...         for u in range(2):
        ...             y[u] += x[rows[n], u]
        ... ''')
        >>> x, y = torch.arange(6.0, dtype=torch.float64).view(3, 2), torch.zeros(2).double()
        >>> add(x, torch.tensor([0, 2]), 0, 2, y)
        >>> y
        tensor([4., 6.], dtype=torch.float64)
    """
    defined = [part for part in ast.parse(text).body if isinstance(part, ast.FunctionDef)]
    definition = defined[-1]
    kinds = [_kind(argument) for argument in definition.args.args]
    key = hashlib.sha256("\n".join([text, *flags, str(wide), _compiler()]).encode()).hexdigest()
    code = kept_code(key)
    if code is None:
        narrow = any(kind.dtype == "float32" for kind in kinds) and not wide
        code = _compiled(_module(defined, kinds, flags, REALS["float32" if narrow else "float64"]))
        keep_code(key, code)
    return _loaded(code, definition.name, kinds)


def _loaded(code: bytes, name: str, kinds: list[_Kind]) -> Callable[..., None]:
    """A function of an object file, with its checks of what it is given."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    count = sum(len(kind.types) for kind in kinds)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(engine.get_function_address(name))
    needed = [kind.needed for kind in kinds]

    def call(*arguments: Any) -> None:
        function(*_passed(needed, arguments))

    call.engine = engine  # type: ignore[attr-defined]  # it holds the code
    return call


def _passed(needed: list[tuple[torch.dtype, int]], given: tuple[Any, ...]) -> Iterator[int]:
    """The integers and addresses of a call; needed: dtype and dimensions of each tensor."""
    for (dtype, dimensions), t in zip(needed, given, strict=True):
        if not dimensions:
            yield t
            continue
        if t.dtype is not dtype or t.dim() != dimensions or not t.is_contiguous():
            raise DTypeError(
                f"a tensor {tuple(t.shape)} of {t.dtype} and strides {t.stride()} was given to "
                f"machine code, which needs {dimensions} dimensions of {dtype}, contiguous: "
                "convert it, or print the kind of the argument anew."
            )
        yield t.data_ptr()
        if dimensions == 2:
            yield t.shape[1]


def _kind(argument: ast.arg) -> _Kind:
    text = ast.unparse(argument.annotation) if argument.annotation else ""
    found = re.fullmatch(r"(?=int64$|.*\])(\w+)((?:\[:\]){0,2}|\[:, :\])", text)
    if found is None or found[1] not in _TYPES:
        raise ValueError(
            f"the argument {ast.unparse(argument)!r} of machine code has no kind: write int64, or "
            f"a dtype of {', '.join(_TYPES)} with [:], [:, :] or [:][:] behind it."
        )
    return _Kind(found[1], found[2])


def _compiled(text: ir.Module) -> bytes:
    """The object file of LLVM's text."""
    module = llvm.parse_assembly(str(text))
    target = _target()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = True
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    found: bytes = target.emit_object(module)
    return found


def _module(
    defined: list[ast.FunctionDef], kinds: list[_Kind], flags: tuple[str, ...], real: Any
) -> ir.Module:
    """LLVM's text of the last function, whose numbers are `real`."""
    *others, definition = defined
    module = ir.Module("machine_code")
    module.triple = llvm.get_process_triple()
    types = [of for kind in kinds for of in kind.types]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), definition.name)
    entry, begin = (function.append_basic_block(name) for name in ("entry", "begin"))
    ir.IRBuilder(entry).branch(begin)
    builder = ir.IRBuilder(begin)
    emitter = Emitter(
        builder,
        real,
        called=functools.partial(functions.call, builder),
        flags=flags,
        defined={other.name: other for other in others},
    )
    passed = iter(function.args)
    for argument, kind in zip(definition.args.args, kinds, strict=True):
        value, *width = (next(passed) for _ in kind.types)
        if kind.shape:
            value.add_attribute("noalias")
        emitter.give(argument.arg, value, *width)
    emitter.statements(definition.body)
    emitter.builder.ret_void()
    return module


def _target() -> Any:
    """This processor, as LLVM knows it: anew for each engine, which deletes it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3,
        reloc="default", codemodel="jitdefault", jit=True,
    )  # fmt: skip


@functools.cache
def _compiler() -> str:
    """All but the text that machine code depends on."""
    parts = __file__, functions.__file__, instructions.__file__
    written = source_hash(*(pathlib.Path(str(part)) for part in parts))
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return " ".join([written, llvmlite.__version__, llvm.get_process_triple(), *processor])
