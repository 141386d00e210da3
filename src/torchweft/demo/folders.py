"""What a page needs before the work: a folder to write to, and matplotlib."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from torchweft.errors import BackendError

__all__ = ["make_folder", "require_matplotlib"]


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        BackendError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib is not installed: pages take their pictures from it, and the demo its "
            "elevation model. Run pip install matplotlib ase rich."
        )


def make_folder(out: Path) -> None:
    """The folder of a page, made before the work, which a wrong name would cost.

    Raises:
        NotADirectoryError: it cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK)
        reason = "it may not be written"
    except OSError as error:
        writable, reason = False, str(error.strerror).lower()
    if not writable:
        raise NotADirectoryError(
            f"--out is {out}: a folder for the page is needed, and {reason}. Pass another --out."
        )
