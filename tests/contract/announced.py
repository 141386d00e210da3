"""What first calls announce to the compiler, and what they then call; nothing runs on a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from torchweft.core.gpu import binaries, launcher

Signature = tuple[Any, ...]


def signature(kernel: Any, arguments: tuple[Any, ...], free: frozenset[str]) -> Signature:
    """What machine code depends on: dtypes, which tensors are None, constants.

    Args:
        kernel: a jitted function.
        arguments: its own.
        free: names of numbers that no code depends on.
    """
    kinds = (a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)
    names = kernel.arg_names
    return kernel, *("number" if n in free else k for n, k in zip(names, kinds, strict=True))


def watch(
    replace: Callable[[Any, str, Any], None], free: frozenset[str] = frozenset()
) -> tuple[list[Signature], list[Signature]]:
    """Signatures that are announced, and those compiled: machine code is a stub.

    Args:
        replace: monkeypatch.setattr.
        free: see `signature`.
    """
    announced: list[Signature] = []
    compiled: list[Signature] = []

    def machine_code(kernel: Any, arguments: tuple[Any, ...], options: Any) -> Any:
        compiled.append(signature(kernel, arguments, free))
        assert list(binaries._made_of(kernel))  # what has a key is found on disk
        assert list(binaries._kinds(kernel, arguments))
        return lambda programs, stream, values: None

    def in_threads(calls: list[launcher.Call]) -> None:
        for kernel, tensors, numbers in calls:
            arguments = (*tensors, *numbers, *kernel._arguments)
            announced.append(signature(kernel._kernel, arguments, free))

    replace(binaries, "state", lambda module: None)  # others import modules too
    replace(binaries, "as_loaded", {})
    replace(launcher, "_loaded", machine_code)
    replace(launcher, "_compile_in_threads", in_threads)
    replace(launcher, "_current_stream", lambda: 0)
    replace(launcher, "_made", set())
    return announced, compiled
