"""Compile Triton kernels to machine code, without a GPU and without torch.

    syntax → Triton's dialect → the GPU's → LLVM's → PTX → machine code

The key of Triton's cache reads an installation of 400 MB: half a second before the first kernel.
Here Triton's stages are called without its cache and driver: only the first one, `walk`, holds
Python's lock; the others, `lower`, may run in any thread.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchweft.core import versions

__all__ = ["Code", "Pointer", "Walked", "code_of", "layout", "lower", "serves", "walk"]


FORMATS = {
    "i1": "b7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q",
    "u1": "B7x", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q",
    "fp32": "f4x", "fp64": "d", "*": "Q",
}  # fmt: skip
"""The slot of an argument of each type, in the notation of `struct`."""


@dataclass(frozen=True)
class Pointer:
    """In place of a tensor, what code depends on.

    Args:
        dtype: its name, as "torch.float32".
        misaligned: bytes from the last multiple of 16 to its address.
    """

    dtype: str
    misaligned: int

    def data_ptr(self) -> int:
        """An address like the tensor's."""
        return self.misaligned


class Code(NamedTuple):
    """Machine code of a kernel, and what a launch needs.

    Args:
        name: name of its function.
        binary: the code.
        num_warps: warps per program.
        shared: bytes of shared memory per program.
        taken: positions of the arguments that it takes, among all arguments.
        slots: layout of these arguments, for `struct`.
    """

    name: str
    binary: bytes
    num_warps: int
    shared: int
    taken: tuple[int, ...]
    slots: str


class Walked(NamedTuple):
    """A kernel in Triton's dialect, and the remaining stages of its compilation.

    Args:
        source: Triton's description of the source.
        module: the kernel.
        stages: remaining stages by the file extension of their results.
        metadata: options; the stages add what a launch needs.
    """

    source: Any
    module: Any
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]]
    metadata: dict[str, Any]


def serves() -> bool:
    """Whether the installed Triton has the stages and machine code that this module expects."""
    return versions.launches_fast(_version())


@functools.cache
def _version() -> str:
    """The version of Triton from its source text: an import would take a quarter of a second."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    text = pathlib.Path(str(spec.origin)).read_text()
    found = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M)
    assert found is not None
    return found[1]


def walk(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], device: str) -> Walked:
    """A jitted function in Triton's dialect, for arguments like these on an NVIDIA GPU.

    Args:
        kernel: the function.
        arguments: all its arguments; a `Pointer` may stand for a tensor.
        options: num_warps, num_stages and others of Triton.
        device: architecture, as "sm_90".
    """
    from torchweft.core.private_compilers import (
        ASTSource,
        GluonASTSource,
        GPUTarget,
        create_function_from_signature,
        ir,
        make_backend,
        pack_args,
    )

    target = GPUTarget("cuda", int(device.removeprefix("sm_")), 32)
    backend = make_backend(target)
    given = {"debug": False, "instrumentation_mode": "", **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*arguments, **given)
    packed, *described = pack_args(kernel, backend, given, bound, specialization)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *described)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parts = backend.get_codegen_implementation(packed), backend.get_module_map()
    module = source.make_ir(target, packed, *parts, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, packed, source.language)
    first = list(stages).index(source.ext)
    metadata = {"target": target, **vars(packed)}
    return Walked(source, module, dict(list(stages.items())[first:]), metadata)


def lower(walked: Walked) -> Any:
    """The compiled kernel, with the attributes of Triton's compiled kernels."""
    source, module, stages, metadata = walked
    for stage in stages.values():
        module = stage(module, metadata)
    code = {list(stages)[-1]: module}
    meta = SimpleNamespace(**metadata)
    return SimpleNamespace(name=meta.name, src=source, asm=code, metadata=meta)


def code_of(compiled: Any) -> Code | None:
    """What a compiled kernel's launch needs; None if only Triton can launch it."""
    found, meta = layout(compiled), compiled.metadata
    if found is None:
        return None
    taken, slots = found
    binary = compiled.asm["cubin"]
    return Code(compiled.name, binary, meta.num_warps, meta.shared, tuple(taken), slots)


def layout(code: Any) -> tuple[list[int], str] | None:
    """(positions of the arguments that code takes, their slots); None if only Triton can launch."""
    meta = code.metadata
    plain = (
        serves()
        and meta.target.backend == "cuda"
        and meta.num_ctas == 1
        and not (meta.launch_cooperative_grid or meta.launch_pdl)
        and not (meta.global_scratch_size or meta.profile_scratch_size)
    )
    types = [(i, kind) for i, kind in enumerate(code.src.signature.values()) if kind != "constexpr"]
    slots = [FORMATS.get("*" if str(kind)[0] == "*" else kind) for _, kind in types]
    if not plain or len(slots) < 2 or None in slots:
        return None
    return [i for i, _ in types], "<" + "".join(map(str, slots))
