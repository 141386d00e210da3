"""The folder of files that torchweft keeps between processes, and how it writes them.

    <home>/machine/<key>: sha256 of the rest (32 bytes), the key and a line break, machine code

Code is read only if its checksum and the key inside are right; otherwise it is ignored and
replaced.  Files that were not read for 90 days are deleted by the next process that compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import tempfile
import time

__all__ = ["has_code", "home", "keep_code", "kept_code", "source_hash", "write"]

DIGEST_BYTES = 32

DAY = 86_400

SECONDS_KEPT = 90 * DAY
"""Seconds from its last use after which code is deleted, to a day."""


def home() -> pathlib.Path:
    """$TORCHWEFT_CACHE_DIR or ~/.cache/torchweft."""
    return pathlib.Path(
        os.environ.get("TORCHWEFT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "torchweft"
    )


def write(path: pathlib.Path, data: bytes) -> None:
    """Write a file atomically: readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    pathlib.Path(file.name).replace(path)


@functools.cache
def source_hash(*paths: pathlib.Path) -> str:
    """Hash of source files: a compiled loop on disk holds the functions that it calls."""
    text = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(text).hexdigest()[:16]


def has_code(key: str) -> bool:
    """Whether there is a file for a key, valid or not."""
    return _path(key).exists()


def kept_code(key: str) -> bytes | None:
    """The machine code of a key; None if there is no file, or a damaged one."""
    path = _path(key)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, rest = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    named, _, code = rest.partition(b"\n")
    if digest != hashlib.sha256(rest).digest() or named != key.encode():
        return None
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY:
            os.utime(path)
    return code


def keep_code(key: str, code: bytes) -> None:
    """Write machine code to disk; where that fails, the next process compiles again."""
    rest = key.encode() + b"\n" + code
    path = _path(key)
    with contextlib.suppress(OSError):
        _forget(path.parent)
        write(path, hashlib.sha256(rest).digest() + rest)


@functools.cache
def _forget(folder: pathlib.Path) -> None:
    """Delete files that were not used for `SECONDS_KEPT`, once in a process."""
    limit = time.time() - SECONDS_KEPT
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # another process may delete it too
            if path.stat().st_mtime < limit:
                path.unlink()


def _path(key: str) -> pathlib.Path:
    return home() / "machine" / key
