"""The folder of files that torchweft keeps between processes, and how it writes them."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import tempfile

__all__ = ["home", "source_hash", "write"]


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
