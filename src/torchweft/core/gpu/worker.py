"""A process that compiles kernels for another one: jobs in, code out, until the input ends."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from torchweft.core.gpu.compiler import Code, code_of, lower, walk
from torchweft.core.gpu.workers import READY, Job

__all__ = ["serve"]


def serve() -> None:
    """Answer each job of the standard input on the standard output: its code, or None.

    Before the first, a byte says that Triton is imported.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the caller ends the input
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    sys.meta_path.insert(0, _WithoutTorch())
    importlib.import_module("triton")
    answers.write(READY)
    answers.flush()
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_compiled(job), answers)
        answers.flush()


def _compiled(job: Job) -> Code | None:
    try:
        function = job.kernel().function()
        return code_of(lower(walk(function, job.arguments, job.options, job.device)))
    except Exception:  # noqa: BLE001 - the caller compiles it too, and raises
        return None


class _WithoutTorch(importlib.abc.MetaPathFinder):
    """Finds no torch, whose import takes longer than a kernel; Triton looks for it, and needs none.

    Packages of torchweft are found without their `__init__`, which imports it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package of torchweft as a namespace; None for what others find.

        Raises:
            ModuleNotFoundError: torch.
        """
        if name == "torch":
            raise ModuleNotFoundError("a process that compiles kernels has no torch", name=name)
        if not name.startswith("torchweft."):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.submodule_search_locations is None:
            return None
        bare = importlib.machinery.ModuleSpec(name, None, is_package=True)
        bare.submodule_search_locations = found.submodule_search_locations
        return bare
