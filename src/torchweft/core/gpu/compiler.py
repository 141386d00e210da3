"""Triton's compiler without its cache and its driver.

    syntax → Triton's dialect → the GPU's → LLVM's → PTX → machine code

The key of Triton's cache reads an installation of 400 MB, and its driver is compiled by gcc: half a
second before the first kernel.  Only the first arrow, `walk`, holds Python's lock; the others,
`lower`, may go in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torchweft.core import versions
from torchweft.core.gpu import binary_key as fingerprint

__all__ = ["Walked", "lower", "serves", "walk"]


class Walked(NamedTuple):
    """A kernel in Triton's dialect, and what is left to do.

    Args:
        source: as Triton describes it.
        module: the kernel.
        stages: what follows, by the endings of their results.
        metadata: options; the stages add what a launch needs.
    """

    source: Any
    module: Any
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]]
    metadata: dict[str, Any]


def serves() -> bool:
    """Whether this is a Triton whose stages and machine code are those described here."""
    import triton

    return versions.launches_fast(triton.__version__)


def walk(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Walked:
    """A jitted function for arguments like these on the current device, one of NVIDIA's."""
    from torchweft.core.private import (
        ASTSource,
        GluonASTSource,
        GPUTarget,
        create_function_from_signature,
        ir,
        make_backend,
        pack_args,
    )

    target = GPUTarget("cuda", int(str(fingerprint.device()).removeprefix("sm_")), 32)
    backend = make_backend(target)
    given = {"debug": False, "instrumentation_mode": "", **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, _ = bind(*arguments, **given)
    settled, *described = pack_args(kernel, backend, given, bound, kinds)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *described)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parts = backend.get_codegen_implementation(settled), backend.get_module_map()
    module = source.make_ir(target, settled, *parts, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, settled, source.language)
    first = list(stages).index(source.ext)
    metadata = {"target": target, **vars(settled)}
    return Walked(source, module, dict(list(stages.items())[first:]), metadata)


def lower(walked: Walked) -> Any:
    """The compiled kernel, as Triton describes it."""
    source, module, stages, metadata = walked
    for stage in stages.values():
        module = stage(module, metadata)
    code = {list(stages)[-1]: module}
    meta = SimpleNamespace(**metadata)
    return SimpleNamespace(name=meta.name, src=source, asm=code, metadata=meta)
