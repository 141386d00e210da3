"""Machine code on disk: its key, and its file, which another process reads without Triton.

    key = sha256(torchweft, torch, Triton, device, options, function, arguments)
    code of the key in `core.files`: a line of JSON, the code

function: the text of its module and of the torchweft modules that it imports, as long as these
modules hold what their texts say.
arguments: values of constants; dtypes, alignment and widths of the others, as Triton distinguishes
them.  Triton's own key contains the same, and reads its installation of 400 MB for it.

There is no key where it could be incomplete: for values of unknown types, for modules in which
something was replaced, and while Triton's variables or knobs for debugging are set.  Triton then
compiles at every first call.

A file never goes stale, since its key contains all that the code depends on.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.files import keep_code, kept_code
from torchweft.core.gpu.compiler import Code, Pointer
from torchweft.core.printing.modules import Jitted, as_loaded, state, text

__all__ = ["Code", "device", "key", "kinds", "read", "store"]


HARMLESS_VARIABLES = ("TRITON_CACHE_DIR", "TRITON_HOME")
"""Environment variables of Triton that do not change code."""

VARIABLE_PREFIXES = (
    "TRITON_", "MLIR_", "NVPTX_", "PTXAS_", "LLVM_IR_", "LLVM_ENABLE_", "LLVM_PASS_",
    "LLVM_EXTRACT_", "DISABLE_LLVM_", "DISABLE_PTXAS_", "DISABLE_MMA_", "ALLOW_LHS_", "USE_IR_LOC",
)  # fmt: skip
"""Prefixes of the variables that may change code."""

KNOBS = ("compilation", "language", "nvidia", "runtime")

CONSTANT_TYPES = (int, bool, float, str, type(None))


class _UnknownError(Exception):
    """The code may depend on a value that cannot be part of a key."""


def key(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> str | None:
    """The key of a kernel's code for arguments like these on the current device; None: no key.

    Args:
        kernel: a jitted function, or a `Jitted`.
        arguments: all its arguments.
        options: num_warps and num_stages.
    """
    name = device()
    if name is None:
        return None
    try:
        tools = _tools()
        what, kinds = list(_made_of(kernel)), list(_kinds(kernel, arguments))
    except _UnknownError:
        return None
    parts = (_versions(), tools, name, sorted(options.items()), what, kinds)
    return _digest(repr(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_known_digest = functools.lru_cache(maxsize=256)(_digest)
"""The digest of a text that many keys share."""


# the compiler


def device() -> str | None:
    """Architecture of the current NVIDIA GPU; None if none is in use."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


@functools.cache
def _versions() -> str:
    """Versions of torchweft and torch; sizes and times of Triton's files, which may be edited."""
    import torchweft

    package = pathlib.Path(str(getattr(importlib.util.find_spec("triton"), "origin", ""))).parent
    stats = [(name, _stat(package / name)) for name in _files(package)]
    own = [(CORE / name).read_text() for name in OURS]
    triton = (package / "__init__.py").read_text()
    return _digest(repr((torchweft.__version__, torch.__version__, triton, stats, own)))


def _files(package: pathlib.Path) -> list[str]:
    """Files of Triton on which compiled code depends."""
    found = []
    for part in ("_C", "backends", "compiler", "experimental", "language", "runtime"):
        for folder, _, files in os.walk(package / part):
            at = os.path.relpath(folder, package)
            found += [f"{at}/{f}" for f in files if f.endswith((".py", ".so", ".bc", "ptxas"))]
    return sorted(found)


CORE = pathlib.Path(__file__).parents[1]

OURS = (
    "gpu/binaries.py",
    "gpu/compiler.py",
    "gpu/driver.py",
    "printing/modules.py",
)
"""Files of core that define what a key and a cached binary mean."""


def _stat(path: pathlib.Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _tools() -> list[tuple[str, str, Any]]:
    """Programs and libraries that environment variables substitute for Triton's own.

    Raises:
        _UnknownError: variables or knobs of Triton are set that change or observe compilation.
    """
    found = []
    for name in os.environ:
        if not name.startswith(VARIABLE_PREFIXES) or name in HARMLESS_VARIABLES:
            continue
        if not name.endswith("_PATH"):
            raise _UnknownError
        if name.startswith("TRITON_"):
            path = pathlib.Path(os.environ[name])
            found.append((name, os.environ[name], _stat(path) if path.exists() else None))
    knobs = sys.modules.get("triton.knobs")
    if knobs and any(any(vars(getattr(knobs, group)).values()) for group in KNOBS):
        raise _UnknownError
    return sorted(found)


# the function: texts of modules, which may not be imported yet


def _made_of(kernel: Any) -> Iterator[str]:
    source = kernel.src if isinstance(kernel, Jitted) else _text_of(kernel)
    yield kernel.__name__
    yield from _texts(source, set())


def _text_of(kernel: Any) -> str:
    """The text of the module of a function that Triton has made, if nothing in it was replaced."""
    name = getattr(getattr(kernel, "fn", None), "__module__", "")
    module = sys.modules.get(name)
    if module is None or state(module) != as_loaded.get(name):
        raise _UnknownError
    return pathlib.Path(str(module.__file__)).read_text()


def _texts(source: str, seen: set[str]) -> Iterator[str]:
    """Digests of the text of a module, and of those of the torchweft modules that it imports."""
    yield _known_digest(source)
    for module in _imported(source):
        if module in seen:
            continue
        seen.add(module)
        try:
            following = text(module)
        except ImportError as error:
            raise _UnknownError from error
        loaded, kernels = sys.modules.get(module), re.search(r"^import triton", following, re.M)
        if loaded and kernels and state(loaded) != as_loaded.get(module):
            raise _UnknownError  # something in the module may have been replaced
        yield module
        yield from _texts(following, seen)


@functools.lru_cache(maxsize=256)
def _imported(source: str) -> tuple[str, ...]:
    found = []
    for origin, module, more in IMPORT.findall(source):
        name = origin or module
        package = name.partition(".")[0]
        if more or package not in KNOWN:
            raise _UnknownError
        if package == "torchweft":
            found.append(name)
    return tuple(found)


IMPORT = re.compile(r"^ *(?:from +([\w.]+) +import\b|import +([\w.]+)( *,)?)", re.M)

KNOWN = frozenset(("triton", "torchweft", *sys.stdlib_module_names))
"""Packages whose modules are in the key, or do not affect code."""


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    kind = type(value)
    if kind in CONSTANT_TYPES or (kind.__name__, kind.__module__) == (
        "dtype",
        "triton.language.core",
    ):
        return kind.__name__, repr(value)
    raise _UnknownError


# the arguments


def kinds(kernel: Any, arguments: Sequence[Any]) -> tuple[Any, ...] | None:
    """The properties of arguments on which code depends; None for values of unknown types."""
    try:
        return tuple(_kinds(kernel, arguments))
    except _UnknownError:
        return None


def _kinds(kernel: Any, arguments: Sequence[Any]) -> Iterator[Any]:
    if len(arguments) != len(kernel.arg_names):
        raise _UnknownError
    constants = frozenset(kernel.constexprs)
    if isinstance(kernel, Jitted):
        loose = kernel.loose
    else:
        loose = frozenset(p.num for p in getattr(kernel, "params", ()) if p.do_not_specialize)
    for i, value in enumerate(arguments):
        yield _plain(value) if i in constants else _kind(value, i in loose)


def _kind(value: Any, loose: bool) -> Any:
    """Distinguishes arguments as Triton does, or finer."""
    if isinstance(value, Tensor | Pointer):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if type(value) is float:
        return "fp32"
    if type(value) is not int:
        return _plain(value)
    width = "i32" if -(2**31) <= value < 2**31 else "i64" if -(2**63) <= value < 2**63 else "u64"
    return width if loose else (width, value == 1, value % 16 == 0)


# the files


def read(key: str) -> Code | None:
    """The code of a key; None if there is no file, or a damaged one."""
    data = kept_code(key)
    if data is None:
        return None
    head, _, binary = data.partition(b"\n")
    found = json.loads(head)
    return Code(binary=binary, **found | {"taken": tuple(found["taken"])})


def store(key: str, code: Code) -> None:
    """Write code to disk; where that fails, the next process compiles again."""
    head = code._asdict()
    del head["binary"]
    keep_code(key, json.dumps(head).encode() + b"\n" + code.binary)
