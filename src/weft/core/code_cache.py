"""Machine code on disk, so that another process need not ask Triton for it.

    <home>/machine/<key>: sha256 of the rest (32 bytes), a line of JSON, the code

A key says all that code follows from (`fingerprint.py`), so a file never goes stale.  It is read
only if its checksum and the key inside are right; any other is as good as none, and is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from typing import NamedTuple

from weft.core.files import home, write

__all__ = ["Code", "exists", "read", "store"]

DIGEST = 32


class Code(NamedTuple):
    """Machine code of a kernel, and what a launch needs.

    Args:
        name: of the function in it.
        binary: the code.
        num_warps: of a program.
        shared: bytes of shared memory of a program.
        taken: places of the arguments that it takes, among all.
        slots: how they are laid out, for `struct`.
    """

    name: str
    binary: bytes
    num_warps: int
    shared: int
    taken: tuple[int, ...]
    slots: str


def exists(key: str) -> bool:
    """Whether there is a file of this key, right or not."""
    return _path(key).exists()


def read(key: str) -> Code | None:
    """The code of a key; None if there is none, or a file that is not what was written."""
    try:
        data = _path(key).read_bytes()
    except OSError:
        return None
    digest, rest = data[:DIGEST], data[DIGEST:]
    if digest != hashlib.sha256(rest).digest():
        return None
    head, _, binary = rest.partition(b"\n")
    found = json.loads(head)
    if found.pop("key", None) != key:
        return None
    return Code(binary=binary, **found | {"taken": tuple(found["taken"])})


def store(key: str, code: Code) -> None:
    """Keep it; where nothing can be written, the next process compiles again."""
    head = {"key": key} | code._asdict()
    del head["binary"]
    rest = json.dumps(head).encode() + b"\n" + code.binary
    with contextlib.suppress(OSError):
        write(_path(key), hashlib.sha256(rest).digest() + rest)


def _path(key: str) -> pathlib.Path:
    return home() / "machine" / key
