"""Machine code on disk, so that another process need not ask Triton for it.

    <home>/machine/<key>: sha256 of the rest (32 bytes), a line of JSON, the code

A key says all that code follows from (`fingerprint.py`), so a file never goes stale.  It is read
only if its checksum and the key inside are right; any other is as good as none, and is replaced.
What nobody has read for a season is deleted by the next process that compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import time
from typing import NamedTuple

from torchweft.core.files import home, write

__all__ = ["Code", "exists", "read", "store"]

DIGEST = 32

DAY = 86_400

SEASON = 90 * DAY
"""Seconds that code is kept from its last use on, to a day."""


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
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, rest = data[:DIGEST], data[DIGEST:]
    if digest != hashlib.sha256(rest).digest():
        return None
    head, _, binary = rest.partition(b"\n")
    found = json.loads(head)
    if found.pop("key", None) != key:
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)
    return Code(binary=binary, **found | {"taken": tuple(found["taken"])})


def store(key: str, code: Code) -> None:
    """Keep it; where nothing can be written, the next process compiles again."""
    head = {"key": key} | code._asdict()
    del head["binary"]
    rest = json.dumps(head).encode() + b"\n" + code.binary
    path = _path(key)
    with contextlib.suppress(OSError):
        _forget(path.parent)
        write(path, hashlib.sha256(rest).digest() + rest)


@functools.cache
def _forget(folder: pathlib.Path) -> None:
    """Delete what was not used for a season, once in a process."""
    limit = time.time() - SEASON
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # another process may delete it too
            if path.stat().st_mtime < limit:
                path.unlink()


def _path(key: str) -> pathlib.Path:
    return home() / "machine" / key
