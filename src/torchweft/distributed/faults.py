"""An error of one rank ends the others with its name: no rank waits for one that has gone.

Torch tells the other ranks that a connection was closed, or nothing where they wait on a GPU.  Here
the first error is written into the group's store, in which a thread of every rank looks for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from torch import distributed

from torchweft.core.collectives import Group, world
from torchweft.errors import RankError

__all__ = ["propagate_errors"]

LOOK_EVERY = 0.2
"""Seconds between two looks into the store."""
GRACE = 5.0
"""Seconds that a rank has to leave the block by itself, and that an error waits to be heard."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def propagate_errors(group: Group | None = None) -> Iterator[None]:
    """Ends every rank when one of them raises an error.  Every rank enters the block together.

    Either all ranks leave the block, or all end with the first error that was raised in it:

    - the rank that raised it raises it;
    - a rank that leaves the block, or whose call fails because the other has gone, raises a
      `RankError` with the rank and the error;
    - a rank that still waits in a collective, or computes, 5 s after it learns of the error exits
      by `os._exit(1)`: nothing else ends a wait in gloo, and after the abort of a wait in NCCL its
      results would be read as numbers.

    Each rank also writes the error to the log `torchweft.distributed.faults`.  After an error the
    group cannot be used any more.  A process that is killed raises nothing: the others name the
    error of the first that notices.

    Args:
        group: the ranks; None: all.

    Returns:
        A context manager.

    Raises:
        RankError: an error was raised on another rank.

    Cost: each rank reads the store of torch.distributed every 0.2 s; one barrier at the end;
    nothing with one rank.

    Example:
        >>> import torchweft
        >>> with torchweft.distributed.propagate_errors():
        ...     loss = 1.0  # a training loop
    """
    if world(group)[1] == 1:
        yield
        return
    watch = _Watch(group)
    watch.start()
    try:
        yield
        watch.wait_for_others()
    except BaseException as error:
        own = watch.text(error)
        first = watch.publish(own)
        if first == own:
            raise
        raise RankError(first) from error
    finally:
        watch.left.set()
        watch.join()


class _Watch(threading.Thread):
    """Looks for an error of another rank until this one has left the block."""

    def __init__(self, group: Group | None) -> None:
        super().__init__(name="torchweft-errors", daemon=True)
        self.rank, self.size = world(group)
        everyone: Any = distributed.group.WORLD
        self.group = everyone if group is None else group
        store = self.group.get_group_store()
        prefixed = distributed.PrefixStore  # type: ignore[attr-defined]
        block = f"torchweft/block {store.add(f'torchweft/entered/{self.rank}', 1)}"
        self.store = prefixed(block, store)
        self.own_connection = prefixed(block, store.clone())
        self.left = threading.Event()
        self.told: str | None = None

    def run(self) -> None:
        while not self.left.wait(LOOK_EVERY):
            if (told := self._look()) is not None:
                self.told = told
                self._end()
                return

    def _look(self) -> str | None:
        """The first error, if there is one."""
        store = self.own_connection
        try:
            if not store.check(["error"]):
                return None
            told: str = store.get("error").decode()
            store.add("told", 1)
        except RuntimeError as error:
            if self.left.wait(LOOK_EVERY):  # all have left, and the store went with its rank
                return None
            return f"the store of the ranks, and the rank that holds it, have gone: {error}"
        return told

    def _end(self) -> None:
        _log.error("rank %d ends, since %s", self.rank, self.told)
        if not self.left.wait(GRACE):
            _log.error("rank %d did not leave in %s s: its process exits", self.rank, GRACE)
            os._exit(1)

    def text(self, error: BaseException) -> str:
        """The text of an error for the other ranks."""
        if isinstance(error, RankError):
            return str(error)
        return (
            f"rank {self.rank} raised {type(error).__name__}: {error}\n"
            f"No rank can go on without it. See the traceback of rank {self.rank}."
        )

    def publish(self, text: str) -> str:
        """The first error of all ranks; waits until the others have read it if it is this one."""
        self.left.set()
        self.join()
        if self.told is not None:
            return self.told
        first: str = self.store.compare_set("error", "", text).decode()
        if first != text:
            self.store.add("told", 1)
            return first
        end = time.monotonic() + GRACE
        while self.store.add("told", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(LOOK_EVERY / 4)
        return first

    def wait_for_others(self) -> None:
        """Returns when every rank is here, and raises where one never will be."""
        arrived = distributed.barrier(self.group, async_op=True)
        while not arrived.is_completed():
            if self.told is not None:
                raise RankError(self.told)
            time.sleep(LOOK_EVERY / 20)
        arrived.wait()
