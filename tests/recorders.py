"""A recorder for tests without a GPU: a replay runs the function again in the same memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

from torchweft.capturing.functions import CapturedFunction
from torchweft.capturing.graphs import waits_are_named
from torchweft.o3.dynamics import recording


class Executed:
    """Counts what it does; results are in the same memory at each replay, as those of a graph."""

    def __init__(self) -> None:
        self.rehearsals, self.records, self.replays = 0, 0, 0

    def rehearse(self, run: Callable[[], Any]) -> Any:
        self.rehearsals += 1
        with waits_are_named():
            return run()

    def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.records += 1
        memory: list[Any] = []

        def replay() -> list[Any]:
            self.replays += 1
            found = run()
            if not memory:
                memory.extend(found)
            for held, new in zip(memory, found, strict=True):
                if isinstance(held, Tensor):
                    held.copy_(new)
            return memory

        return replay


def captured(
    function: Callable[..., Any], *examples: Any, sizes: Any = None
) -> tuple[CapturedFunction, Executed]:
    """What `torchweft.capture` returns on a GPU, and its recorder."""
    recorder = Executed()
    return CapturedFunction(function, examples, sizes, recorder), recorder


@contextlib.contextmanager
def structures_recorded(recorded: bool = True) -> Iterator[list[Executed]]:
    """Inside, calculators record potentials as on a GPU, or none; the recorders, as they come."""
    made: list[Executed] = []

    def capture(function: Any, *examples: Any, sizes: Any) -> CapturedFunction:
        run, recorder = captured(function, *examples, sizes=sizes)
        made.append(recorder)
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "capture", capture)
        patch.setattr(recording, "_is_recorded", lambda s: recorded and len(s.species) > 0)
        yield made
