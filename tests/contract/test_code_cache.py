"""Machine code on disk: found again in another process, never in place of other code.

A GPU that is not here stands in: Triton compiles for it, a stub of the driver is given the code.
Seen red with: checksums that nobody looks at, a file that is read under another's key, files
written where others read; code that is deleted though it was read, or never, or at once; modules
that threads run, a text that changes while it is compiled, kernels compiled ahead that are on disk,
gradients whose kernels wait for each other.
"""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.contract.some_kernel import HELPERS, a_process, printed, save
from torchweft.core import files
from torchweft.core.gpu import binaries, compiler, launcher
from torchweft.core.gpu import driver as machine
from torchweft.core.gpu.launcher import Call, Kernel, Tile, compile_together
from torchweft.core.printing import modules as generated
from torchweft.reductions.engine import operator
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.gpu import gaussians, launch, recipe

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    yield from a_process(monkeypatch, tmp_path)


# files


CODE = binaries.Code("name", bytes(range(256)) * 4, 8, 49_153, (0, 2), "<Qi4x")


def test_what_is_stored_is_read(driver):
    binaries.store("one", CODE)
    assert files.has_code("one")
    assert binaries.read("one") == CODE
    assert binaries.read("two") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: b"\0" * len(data),
    ],
)
def test_a_damaged_file_is_as_good_as_none(damage, driver):
    binaries.store("one", CODE)
    path = files.home() / "machine" / "one"
    path.write_bytes(damage(path.read_bytes()))
    assert binaries.read("one") is None
    binaries.store("one", CODE)
    assert binaries.read("one") == CODE


def test_a_file_of_another_key_is_as_good_as_none(driver):
    binaries.store("one", CODE)
    folder = files.home() / "machine"
    (folder / "one").rename(folder / "two")
    assert binaries.read("two") is None


def test_a_disk_that_takes_nothing_costs_only_time(driver, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHWEFT_CACHE_DIR", str(tmp_path / "file"))
    binaries.store("one", CODE)
    assert binaries.read("one") is None


def test_what_nobody_reads_for_a_season_is_deleted(driver):
    old = time.time() - 2 * files.SECONDS_KEPT
    for key in ("read", "left", "young"):
        binaries.store(key, CODE)
    for key in ("read", "left"):
        os.utime(files.home() / "machine" / key, (old, old))
    assert binaries.read("read") == CODE
    files._forget.cache_clear()
    binaries.store("new", CODE)
    assert not files.has_code("left")
    assert all(map(files.has_code, ("read", "young", "new")))


def test_writers_and_readers_at_once(driver):
    found = []

    def write():
        for _ in range(50):
            binaries.store("one", CODE)

    def read():
        found.extend(binaries.read("one") for _ in range(200))

    binaries.store("one", CODE)
    threads = [threading.Thread(target=work) for work in (write, read, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CODE] * 400


# first calls


def first_call(helpers=HELPERS):
    kernel = Kernel(printed(helpers), (100,), (), Tile((128,), 4, 1))
    kernel(1, [torch.zeros(64), torch.zeros(64)])


@pytest.fixture
def asked(monkeypatch):
    """How often a kernel was compiled."""
    found, walk = [], machine.walk
    monkeypatch.setattr(machine, "walk", lambda *given: found.append(1) or walk(*given))
    return found


def test_the_second_process_asks_triton_for_nothing(driver, monkeypatch, asked):
    first_call()
    assert len(asked) == 1
    first_call()
    assert len(asked) == 1
    assert driver.loaded[0] == driver.loaded[1]
    assert driver.launched == ["some_kernel"] * 2


def test_a_damaged_file_is_compiled_again_and_replaced(driver, monkeypatch, asked):
    first_call()
    (path,) = (files.home() / "machine").iterdir()
    right = path.read_bytes()
    path.write_bytes(right[:100])
    first_call()
    assert len(asked) == 2
    assert path.read_bytes() == right
    assert driver.loaded[0] == driver.loaded[1]


def test_a_helper_that_changed_is_compiled(driver, monkeypatch, asked):
    first_call()
    first_call(HELPERS.replace("x * FACTOR", "x / (FACTOR + 5)"))
    assert len(asked) == 2
    assert driver.loaded[0][1] != driver.loaded[1][1]


def test_what_is_on_disk_is_not_compiled_ahead(driver, monkeypatch, asked):
    tensors = [torch.zeros(64), torch.zeros(64)]
    for _ in range(2):
        kernels = [Kernel(printed(), (100,), (), Tile((block,), 4, 1)) for block in (64, 128)]
        compile_together([Call(kernel, tensors) for kernel in kernels])
        assert len(asked) == 2
        for kernel in kernels:
            kernel(1, tensors)
    assert len(asked) == 2
    assert not machine._begun


def test_modules_are_run_by_the_thread_that_calls(driver, monkeypatch):
    """Threads that import modules of one package at once wait for each other."""
    threads, load = [], generated.load

    def noted(name, source):
        threads.append(threading.current_thread())
        return load(name, source)

    noted.cache_clear = load.cache_clear
    monkeypatch.setattr(generated, "load", noted)
    tensors = [torch.zeros(64), torch.zeros(64)]
    kernels = [Kernel(printed(), (100,), (), Tile((block,), 4, 1)) for block in (64, 128)]
    compile_together([Call(kernel, tensors) for kernel in kernels])
    assert threads == [threading.main_thread()] * 2
    for kernel in kernels:
        kernel(1, tensors)  # nothing goes on behind


def test_kernels_of_gradients_are_compiled_side_by_side(driver, monkeypatch):
    """Those of both axes are begun before the first of them is launched."""
    monkeypatch.setattr(operator, "choose", lambda backend, device: "triton")
    for module in (gaussians, launch, recipe):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    before, begin = [], launcher.begin
    distance = node("sqdist", var(0, 3, 0), var(1, 3, 1)) * 0.7301  # of this test alone
    x, y = (torch.zeros(n, 3, requires_grad=True) for n in (300, 5000))
    out = reduce("Sum", node("exp", -distance), [x, y], 1)
    launched = len(driver.launched)

    def noted(kernel, *given):
        before.append((kernel.__name__, len(driver.launched)))
        return begin(kernel, *given)

    monkeypatch.setattr(launcher, "begin", noted)
    torch.autograd.grad(out, (x, y), torch.ones(300, 1))
    assert before.count(("sums_kernel", launched)) == 2
    assert {count for _, count in before} == {launched}


def test_code_is_not_stored_where_a_text_changes_meanwhile(driver, monkeypatch, asked):
    walk = machine.walk

    def edited(*given):
        save("helpers_of_a_test", HELPERS.replace("+ 1", "+ 3"))
        return walk(*given)

    monkeypatch.setattr(machine, "walk", edited)
    first_call()
    assert len(asked) == 1
    assert not (files.home() / "machine").exists()


def test_code_that_only_triton_can_launch_is_not_stored(driver, monkeypatch, asked):
    monkeypatch.setattr(compiler, "layout", lambda compiled: None)
    monkeypatch.setattr(machine, "_by_triton", lambda compiled: lambda *_: None)
    for _ in range(2):
        first_call()
    assert len(asked) == 2
    assert not (files.home() / "machine").exists()


CALL = """
import torch
from torchweft.reductions.gpu import gaussians
from torchweft.reductions.gpu import launch, recipe
from torchweft.reductions.engine import operator
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.engine.reduction import reduce
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.call import Options, ReductionData, Sizes
distance = node("sqdist", var(0, 3, 0), var(1, 3, 1))
values = {0: torch.zeros(1, 300, 3), 1: torch.zeros(1, 5000, 3)}
gaussians.processors = launch.processors = recipe.processors = lambda device: 132
data = ReductionData(values, Sizes(1, 300, 5000), None, Options("ieee"))
launch.sums(node("exp", -distance), data)
"""

ALONE = """
import sys
import torch
from torchweft.core import private
private.get_device = lambda: 0
from tests.contract.absent_gpu import without_triton
driver = without_triton(setattr)
{call}
assert "triton" not in sys.modules
print([name for name, code in driver.loaded])
"""


def test_a_process_that_finds_its_code_does_not_import_triton(driver, monkeypatch):
    for module in (gaussians, launch, recipe):
        monkeypatch.setattr(module, "processors", module.processors)
    recipe._recipe.cache_clear()
    monkeypatch.setattr(binaries, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(binaries, "as_loaded", {})
    exec(CALL, {})
    names = [name for name, _ in driver.loaded]
    assert names == ["sums_kernel", "merge_sums_kernel"]
    command = [sys.executable, "-c", ALONE.format(call=CALL)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(names)
