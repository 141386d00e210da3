"""Kernels of a call are compiled by other processes before it runs; nothing runs on a GPU.

Seen red with: launches that other threads leave out too, a dead process whose job waits for ever,
processes that stay behind, jobs for code that is on disk, an edited text that is stored.
"""

import functools
import pickle
import shutil
import threading

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.contract.some_kernel import KERNEL, a_process
from torchweft.core import files
from torchweft.core.gpu import ahead, launcher, workers
from torchweft.core.gpu import driver as machine
from torchweft.core.gpu.ahead import compile_ahead
from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together
from torchweft.core.printing.modules import printed, written

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

ALONE = KERNEL.replace("from torchweft.helpers_of_a_test import changed\n", "").replace(
    "changed(x)", "x * {factor}"
)
WRONG = ALONE.replace("x * {factor}", "x * no_such_name")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    yield from a_process(monkeypatch, tmp_path)


@pytest.fixture
def walked(monkeypatch):
    """Kernels that this process compiles."""
    found, walk = [], machine.walk
    monkeypatch.setattr(machine, "walk", lambda *given: found.append(1) or walk(*given))
    return found


@pytest.fixture
def processes(monkeypatch):
    """Processes that were started."""
    found, start = [], workers._started

    def started():
        found.append(start())
        return found[-1]

    monkeypatch.setattr(workers, "_started", started)
    for module in (workers, ahead):
        monkeypatch.setattr(module, "most_workers", lambda: 2)
    return found


def kernels(*factors, text=ALONE):
    """Launches of kernels that only this test knows."""
    tensors = [torch.zeros(64), torch.zeros(64)]
    found = [kernel(text.format(factor=factor)) for factor in factors]
    return [functools.partial(some, 1, tensors) for some in found]


def kernel(text):
    return Kernel(printed("kernel_of_a_test", text, "some_kernel"), (100,), (), Tile((128,), 4, 1))


def run(calls):
    for call in calls:
        call()


def forget(monkeypatch):
    """As in another process: nothing is loaded or begun."""
    monkeypatch.setattr(machine, "_begun", {})
    monkeypatch.setattr(launcher, "_runs", {})


def test_a_call_leaves_launches_out_and_its_kernels_are_compiled(driver, walked, processes):
    calls = kernels(2, 3, 5)
    compile_ahead(lambda: run(calls))
    assert driver.launched == []
    run(calls)
    assert driver.launched == ["some_kernel"] * 3
    assert walked == []
    assert len(processes) == 2
    assert [process.wait(60) for process in processes] == [0, 0]


def test_the_code_is_that_of_this_process(driver, walked, processes, monkeypatch):
    compile_ahead(lambda: run(kernels(2, 3)))
    run(kernels(2, 3))
    assert walked == []
    assert {process.wait(60) for process in processes} == {0}
    forget(monkeypatch)
    shutil.rmtree(files.home() / "machine")
    run(kernels(2, 3))
    assert len(walked) == 2
    assert driver.loaded[:2] == driver.loaded[2:]


def test_code_on_disk_starts_no_process(driver, walked, processes, monkeypatch):
    compile_ahead(lambda: run(kernels(2, 3)))
    run(kernels(2, 3))
    first = len([process.wait(60) for process in processes])
    forget(monkeypatch)
    compile_ahead(lambda: run(kernels(2, 3)))
    run(kernels(2, 3))
    assert (walked, len(processes)) == ([], first)


def test_kernels_of_the_library_need_no_torch(driver, walked, processes):
    fold = written("torchweft.o3.channelwise.gpu.kernels", "fold_columns_kernel")
    tensors = [torch.zeros(64), torch.zeros(64), None]
    folded = Kernel(fold, (4, 4, 4), (1,), Tile((16, 16), 1, 1))
    compile_ahead(lambda: folded(1, tensors))
    folded(1, tensors)
    assert (walked, driver.launched) == ([], ["fold_columns_kernel"])


def test_kernels_that_are_only_foreseen_are_not_compiled(driver, walked, processes):
    foreseen = kernel(ALONE.format(factor=7))
    compile_ahead(lambda: compile_together([Call(foreseen, [torch.zeros(64), torch.zeros(64)])]))
    assert (walked, processes, machine._begun) == ([], [], {})


class NoProcess:
    """Ends at once; `_end` stays as it is, for processes of earlier tests that end during this."""

    def communicate(self):
        pass


def test_jobs_of_more_work_are_compiled_first(monkeypatch):
    """Seen red with: jobs in the order of their launches."""
    taken, ready = [], threading.Event()
    monkeypatch.setattr(workers, "most_workers", lambda: 1)
    monkeypatch.setattr(workers, "_ready", lambda: ready.wait(60) and NoProcess())
    monkeypatch.setattr(workers, "_answer", lambda _, job: taken.append(pickle.loads(job)))
    found = workers.Workers()
    futures = [found.submit(work, work) for work in (2, 5, 3)]
    ready.set()
    found.close()
    assert [future.result(60) for future in futures] == [None] * 3
    assert taken == [5, 3, 2]


def test_products_of_matrices_are_more_work():
    rows, product = "x = tl.exp(x)\n" * 50, "z = tl.dot(x, y)\n" * 10
    assert machine._work(product) > machine._work(rows) > machine._work(rows[:50])


def test_what_a_process_cannot_compile_is_compiled_here_with_its_error(driver, walked, processes):
    (wrong,), right = kernels(1, text=WRONG), kernels(2, 3)
    compile_ahead(lambda: run([wrong, *right]))
    with pytest.raises(Exception, match="no_such_name"):
        wrong()
    run(right)
    assert walked == [1]
    assert driver.launched == ["some_kernel"] * 2


@pytest.mark.parametrize("begin", ["raise SystemExit(1)", "print(flush=True)", "{path!r}.no_such"])
def test_a_process_that_fails_costs_only_time(begin, driver, walked, processes, monkeypatch):
    monkeypatch.setattr(workers, "BEGIN", begin)
    calls = kernels(2, 3)
    compile_ahead(lambda: run(calls))
    run(calls)
    assert len(walked) == 2
    assert driver.launched == ["some_kernel"] * 2


def test_without_a_python_this_process_compiles(driver, walked, monkeypatch, processes):
    monkeypatch.setattr(workers.spawn, "get_executable", lambda: None)
    calls = kernels(2)
    compile_ahead(lambda: run(calls))
    run(calls)
    assert (len(walked), processes) == (1, [])


def test_with_one_processor_the_call_is_not_made(driver, walked, processes, monkeypatch):
    monkeypatch.setattr(ahead, "most_workers", lambda: 1)
    made = []
    compile_ahead(lambda: made.append(1))
    assert (made, processes) == ([], [])


def test_other_threads_launch(driver, walked, processes):
    here, there = kernels(2), kernels(3)

    def both():
        run(here)
        thread = threading.Thread(target=run, args=(there,))
        thread.start()
        thread.join()

    compile_ahead(both)
    assert driver.launched == ["some_kernel"]
    assert len(walked) == 1


def test_errors_of_the_call(driver, processes):
    def refused():
        raise RuntimeError("torch refuses a number")

    compile_ahead(refused)  # made again for its results, where the numbers are right
    with pytest.raises(ValueError, match="of the caller"):
        compile_ahead(lambda: (_ for _ in ()).throw(ValueError("of the caller")))
    assert ahead.noting() is None
