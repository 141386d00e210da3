"""Launches in a row: kernels that are new are compiled at once, each of them one time, in order.

Seen red with: compilation one after the other, launches in the order in which compilation ends,
the same source compiled in each thread, an error of the compiler that is dropped.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
import triton

from torchweft.core import private
from torchweft.core.gpu import launcher
from torchweft.core.gpu.launcher import Launcher, Launches, Queued, Step, Tile, launch_all

SECONDS = 20
"""What a thread waits for another."""


class Kernel:
    """A jitted function whose compilation ends when as many are under way as there are to be."""

    arg_names, constexprs = ("x_ptr", "BLOCK"), (1,)

    def __init__(self, name, log, together):
        self.__name__, self.log, self.together = name, log, together

    def run(self, *arguments, grid, warmup, **options):
        assert warmup
        self.log.append(("compile", self.__name__))
        self.together.wait(SECONDS)


@pytest.fixture
def log(monkeypatch):
    made = []

    def machine_code(kernel, arguments, options):
        return lambda programs, stream, values: made.append(("launch", kernel.__name__, programs))

    monkeypatch.setattr(launcher, "machine_code", machine_code)
    monkeypatch.setattr(launcher, "interpreted", lambda: False)
    monkeypatch.setattr(launcher, "_current_stream", lambda: 0)
    monkeypatch.setattr(launcher, "_made", set())
    monkeypatch.setattr(launcher, "_runs", {})
    monkeypatch.setattr(private, "get_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    driver = SimpleNamespace(get_current_target=lambda: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return made


def queued(kernel, programs):
    made = Launcher(kernel, programs, (), (), (), Tile((16,)))
    return Queued(made, [torch.zeros(4)])


def test_new_kernels_are_compiled_at_once_and_launched_in_order(log):
    together = threading.Barrier(2)
    one, other = (Kernel(name, log, together) for name in ("one", "other"))
    launch_all([queued(one, 1), queued(other, 2), queued(one, 3)])
    assert sorted(log[:2]) == [("compile", "one"), ("compile", "other")]
    assert log[2:] == [("launch", "one", 1), ("launch", "other", 2), ("launch", "one", 3)]
    # for other sizes the code is the same
    log.clear()
    launch_all([queued(other, 4), queued(one, 5)])
    assert log == [("launch", "other", 4), ("launch", "one", 5)]


def test_code_is_loaded_once_for_all_sizes(log, monkeypatch):
    """Seen red with: code asked for by each launcher, a key without widths or without alignment."""
    asked, found = [], launcher.machine_code

    def machine_code(kernel, arguments, options):
        asked.append(arguments[1:-1])
        return found(kernel, arguments, options)

    monkeypatch.setattr(launcher, "machine_code", machine_code)
    kernel = Kernel("one", log, None)
    kernel.arg_names, kernel.constexprs = ("x_ptr", "n", "BLOCK"), (2,)
    plain, odd = torch.zeros(8), torch.zeros(8)[1:]
    for number in (5, 7, 16, 32, 1, 2**40 + 1, 11):
        Launcher(kernel, 3, (), (number,), (), Tile((16,)))([plain])
    Launcher(kernel, 3, (), (5,), (), Tile((16,)))([odd])
    assert asked == [(5,), (16,), (1,), (2**40 + 1,), (5,)]
    assert log == [("launch", "one", 3)] * 8


def test_steps_take_their_tensors(log):
    """Seen red with: tensors by their places among all, not among those that some step takes."""
    seen = []
    kernel = Kernel("one", log, None)
    kernel.arg_names = ("x_ptr", "y_ptr", "BLOCK")
    made = launcher.Kernel(kernel, (), (), Tile((16,)))
    made.aligned = lambda programs, stream, values: seen.append((programs, values))
    tensors = [torch.zeros(4) for _ in range(4)] + [None]
    steps = [Step(made, 2, (3, 1)), Step(made, 0, (1, 3)), Step(made, 5, (1, 4), (7, 8))]
    Launches(steps)(tensors)
    at = [0 if t is None else t.data_ptr() for t in tensors]
    assert seen == [(2, (at[3], at[1], 16)), (5, (at[1], 0, 7, 8, 16))]
    tensors[0] = torch.zeros(8)[1:]  # that no step takes
    Launches(steps)(tensors)
    assert len(seen) == 4


def test_errors_of_the_compiler_are_raised(log):
    def refuse(*_, **__):
        raise RuntimeError("no such instruction")

    kernels = [Kernel(name, log, threading.Barrier(1)) for name in ("one", "other")]
    kernels[1].run = refuse
    with pytest.raises(RuntimeError, match="no such instruction"):
        launch_all([queued(kernels[0], 1), queued(kernels[1], 2)])
    assert ("launch", "one", 1) not in log


def test_the_interpreter_takes_the_dtypes_of_the_first_launch_alone(monkeypatch):
    """On a GPU the code of the first would read the memory of the second."""
    monkeypatch.setattr(launcher, "interpreted", lambda: True)

    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments: self.log.append(grid)

    kernel = launcher.Kernel(Interpreted("sum", [], None), (), (), Tile((16,)))
    kernel(1, [torch.zeros(4), None])
    kernel(1, [torch.ones(8), None])
    with pytest.raises(TypeError, match=r"sum was compiled for \(torch.float32, None\)"):
        kernel(1, [torch.zeros(4, dtype=torch.int64), None])
    with pytest.raises(TypeError, match="must tell these apart"):
        kernel(1, [torch.zeros(4), torch.zeros(4)])
