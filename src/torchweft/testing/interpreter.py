"""Make Triton's CPU interpreter tell the truth: call `install()` before the first kernel runs.

With TRITON_INTERPRET=1 in the environment before the first import of triton (by torch too),
kernels run on the CPU.  Without the repairs below, Triton 3.6 to 3.9 keeps bf16 as uint16 and
*adds the bit patterns as integers*, truncates fp32 → bf16 instead of rounding, sums bf16 tiles as
integers, refuses bf16 atomics, needs a GPU driver for an autotuned kernel, and (3.6 with numpy
2.4) refuses loop bounds that were loaded.  Five changes make it faster: it patches triton.language
once a process and not at every call of a function, leaves out a check for integer overflow whose
result it does not use, remembers which numpy dtype a Triton dtype is, makes the shape of a tensor
once for all tensors of that shape, and checks the operands of a binary operation once for each
pair of types.  Without a GPU it passes tensors on as they are: its copies live until garbage is
collected.

Not repaired, so kernels must not use them: libdevice and inline assembly.  Not modelled: the
least sizes of dots, shared memory, registers (`torchweft.testing.compiler` checks these), TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import autotuner, interpreter

__all__ = ["install"]

Handle: Any = interpreter.TensorHandle
Builder: Any = interpreter.InterpreterBuilder

FLOAT_METHODS = {
    "binary_op": 2,
    "unary_op": 1,
    "create_fma": 3,
    "create_fabs": 1,
    "create_erf": 1,
    "create_rsqrt": 1,
    "create_clampf": 3,
}
"""Methods of the builder that compute on floats, and how many of their arguments are operands."""


def install() -> None:
    """Repair the interpreter of this process; a second call does nothing."""
    if getattr(Builder, "_torchweft_repaired", False):
        return
    Builder._torchweft_repaired = True
    _repair_arithmetic()
    _repair_dot()
    _repair_reductions()
    _repair_casts()
    _repair_atomics()
    _repair_autotune()
    _patch_language_once()
    _skip_overflow_check()
    _remember_numpy_dtypes()
    _share_shapes()
    _remember_operands()
    _unwrap_tensors_first()
    if not torch.cuda.is_available():
        _pass_tensors_as_they_are()
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
        _repair_range()


def _bits_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float_to_bits(values: Any) -> np.ndarray:
    """float32 → bf16 bits: round to nearest, ties to even; NaN stays NaN."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar.name == "bf16"


def _widen(handle: Any) -> Any:
    return Handle(_bits_to_float(handle.data), tl.float32) if _is_bf16(handle) else handle


def _round(handle: Any) -> Any:
    """Back to bf16; what a comparison gave stays boolean."""
    is_float = handle.data.dtype.kind == "f"
    return Handle(_float_to_bits(handle.data), tl.bfloat16) if is_float else handle


def _repair_arithmetic() -> None:
    def through_fp32(method: Callable[..., Any], operands: int) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if True not in map(_is_bf16, args[:operands]):
                return method(self, *args, **kwargs)
            wide = [_widen(a) for a in args[:operands]]
            return _round(method(self, *wide, *args[operands:], **kwargs))

        return wrapped

    for name, operands in FLOAT_METHODS.items():
        setattr(Builder, name, through_fp32(getattr(Builder, name), operands))


def _repair_dot() -> None:
    plain = Builder.create_dot

    def dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        out = plain(self, _widen(a), _widen(b), _widen(acc), *rest)
        return _round(out) if _is_bf16(acc) else out

    Builder.create_dot = dot


def _repair_reductions() -> None:
    """tl.sum, tl.reduce and the scans: widen bf16 operands, run, round the results."""
    plain = interpreter.ReduceScanOpInterface.apply

    def apply(self: Any, operands: Any) -> Any:
        if not isinstance(operands, tuple):
            return self.apply((operands,))[0]
        narrow = [operand.dtype.scalar == tl.bfloat16 for operand in operands]
        widened = tuple(
            self.to_tensor(_bits_to_float(operand.handle.data), tl.float32) if is_bf16 else operand
            for operand, is_bf16 in zip(operands, narrow, strict=True)
        )
        return tuple(
            self.to_tensor(_float_to_bits(result.handle.data.reshape(result.shape)), tl.bfloat16)
            if is_bf16 and result.dtype.scalar == tl.float32
            else result
            for result, is_bf16 in zip(plain(self, widened), narrow, strict=False)
        )

    interpreter.ReduceScanOpInterface.apply = apply


def _repair_casts() -> None:
    plain_cast, plain_fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp

    def constant(self: Any, value: float) -> Any:
        return Handle(_float_to_bits([value]), tl.bfloat16)

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return plain_cast(self, src, dst_type)
        if target == tl.bfloat16:
            return Handle(_float_to_bits(src.data), tl.bfloat16)
        if source == tl.bfloat16:
            return _widen(src) if target == tl.float32 else plain_cast(self, _widen(src), dst_type)
        return plain_cast(self, src, dst_type)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding)

    Builder.get_bf16, Builder.cast_impl, Builder.create_fp_to_fp = constant, cast, fp_to_fp


def _repair_atomics() -> None:
    plain = Builder.create_atomic_rmw
    combine = {"ADD": np.add, "MAX": np.maximum, "MIN": np.minimum}

    def rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if not _is_bf16(value):
            return plain(self, op, ptr, value, mask, *rest)
        apply = next(f for key, f in combine.items() if key in str(op))
        arrays = np.broadcast_arrays(ptr.data, _widen(value).data, mask.data)
        pointers, values, active = (np.atleast_1d(a) for a in arrays)
        previous = np.zeros(pointers.shape, np.uint16)
        for i in np.ndindex(pointers.shape):  # programs run one after the other: no lock needed
            if active[i]:
                previous[i] = _update_cell(pointers[i], apply, values[i])
        return Handle(previous, tl.bfloat16)

    Builder.create_atomic_rmw = rmw


def _update_cell(pointer: np.ndarray, apply: np.ufunc, value: Any) -> Any:
    """Replace the bf16 in memory by `apply(it, value)`; returns the old bits."""
    memory: Any = interpreter._interpreter
    cell, active = pointer.reshape(1), np.ones(1, bool)
    old = memory.load(cell, active, np.zeros(1, np.uint16), np.dtype(np.uint16))
    memory.store(cell, _float_to_bits(apply(_bits_to_float(old), value)), active)
    return old[0]


def _repair_autotune() -> None:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Without a driver there is nothing to time: the first config that pruning leaves."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = self.best_config = self.prune_configs(kwargs)[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        try:
            return self.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            self.nargs = None

    autotuner.Autotuner.run = run


def _repair_range() -> None:
    """`range(lo, hi)` with bounds that were loaded: a tensor of one element is an integer."""
    module: Any = interpreter
    plain = module._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        for name in ("__index__", "__int__"):
            scope.set_attr(
                tensor, name, lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
            )

    module._patch_lang_tensor = patch


def _patch_language_once() -> None:
    """At the first launch, and for good: nothing is compiled in this process."""
    module: Any = interpreter

    def bind(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = module.TritonSemantic(builder)
        plain_member = getattr(member, "__wrapped__", member)  # without its check for `_semantic`

        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return plain_member(*args, **kwargs)

        scope.set_attr(obj, name, bound)

    module._patch_attr = bind
    plain = module._patch_lang
    every_module = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    patch_once = lru_cache(None)(lambda: plain(every_module))

    def patch(fn: Any) -> Any:
        patch_once()
        return module._LangPatchScope()  # restores nothing

    module._patch_lang = patch


def _skip_overflow_check() -> None:
    """The result of the check is read in debug mode alone, and it takes a third of the time."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _remember_numpy_dtypes() -> None:
    module: Any = interpreter
    plain = module._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def numpy_dtype(dtype: Any) -> np.dtype[Any]:
        name = str(dtype)
        if name not in known:
            known[name] = plain(dtype)
        return known[name]

    module._get_np_dtype = numpy_dtype


def _pass_tensors_as_they_are() -> None:
    executor: Any = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, kwargs: (list(args), kwargs)
    executor._restore_args_dev = lambda self, *arguments: None


def _share_shapes() -> None:
    """Tensors and types of one shape share what follows from it; numpy's rules broadcast."""
    core: Any = tl.core
    semantic: Any = interpreter.TritonSemantic
    plain_block, plain_tensor = core.block_type.__init__, core.tensor.__init__
    of_blocks: dict[tuple[Any, ...], tuple[Any, int]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def sizes_of(type_: Any) -> tuple[int, ...]:
        return tuple(type_.shape.values) if type_.is_block() else ()

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes not in of_blocks:
            plain_block(self, element_ty, list(shape))
            of_blocks[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = of_blocks[sizes]
        self.name = f"<{sizes}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type_: Any) -> None:
        sizes = sizes_of(type_)
        if sizes not in of_tensors:
            plain_tensor(self, handle, type_)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.shape, self.numel = of_tensors[sizes]

    def broadcast(self: Any, *tensors: Any) -> Any:
        left, right = tensors
        if left.shape is right.shape:
            return tensors
        shape = np.broadcast_shapes(sizes_of(left.type), sizes_of(right.type))
        return tuple([fitted(self, t, shape) for t in tensors])

    def fitted(self: Any, tensor: Any, shape: tuple[int, ...]) -> Any:
        if sizes_of(tensor.type) == shape:
            return tensor
        data = np.broadcast_to(tensor.handle.data, shape)
        return self.tensor(Handle(data, tensor.dtype), core.block_type(tensor.dtype, shape))

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    semantic.broadcast_impl_value = broadcast


def _remember_operands() -> None:
    """How the operands of a binary operation are converted follows from their types.

    An operand keeps its data and gets the type of the result's shape, as numpy's operations
    broadcast; a Python number becomes the same constant each time.
    """
    tensor: Any = tl.core.tensor
    semantic: Any = interpreter.TritonSemantic
    plain = semantic.binary_op_type_checking_impl
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def described(operand: Any) -> Any:
        return operand.type.name if type(operand) is tensor else (type(operand), operand)

    def converted(operand: Any, to: Any) -> Any:
        if type(operand) is not tensor:
            return to
        return operand if operand.type is to else tensor(operand.handle, to)

    def operands(self: Any, *given: Any, **rules: bool) -> Any:
        lhs, rhs, *flags = given
        key = (described(lhs), described(rhs), *flags, *rules.items())
        if key in known:
            left, right = known[key]
            return converted(lhs, left), converted(rhs, right)
        found = plain(self, *given, **rules)
        pairs = list(zip((lhs, rhs), found, strict=True))
        if all(type(a) is not tensor or a.dtype.name == b.dtype.name for a, b in pairs):
            known[key] = tuple([b.type if type(a) is tensor else b for a, b in pairs])
        return found

    semantic.binary_op_type_checking_impl = operands


def _unwrap_tensors_first() -> None:
    """Most of what may be a constexpr is a tensor or a number."""
    core: Any = tl.core
    plain = core._unwrap_if_constexpr
    unwrapped = frozenset((core.tensor, core.dtype, int, float, bool))
    core._unwrap_if_constexpr = lambda value: value if type(value) in unwrapped else plain(value)
