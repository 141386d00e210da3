"""Machine code on disk: found again in another process, never in place of other code.

A GPU that is not here stands in: Triton compiles for it, a stub of the driver is given the code.
Seen red with: a key without the functions that are called, without constants, without versions,
without the width or the alignment of an argument; checksums that nobody looks at, a file that is
read under another's key; code that is read although Triton is being debugged, or although a module
is not what its text says; modules that threads run, a text that changes while it is compiled.
"""

import importlib
import itertools
import pathlib
import subprocess
import sys
import threading

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

import weft
from tests.conftest import INTERPRETED
from tests.contract.absent_gpu import stand_in
from weft.core import code_cache, files, fingerprint, generated, machine
from weft.core.launcher import Call, Kernel, Tile, compile_together
from weft.reductions import gaussians, launch
from weft.reductions.formula import node, var

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

HELPERS = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(2)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def changed(x):
    return scaled(x) + 1
"""

KERNEL = """
import triton
import triton.language as tl

from weft.helpers_of_a_test import changed


@triton.jit
def some_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, changed(x), mask=i < n)
"""

DISTANCE = node("sqdist", var(0, 3, 0), var(1, 3, 1))
OPTIONS = {"num_warps": 4, "num_stages": 1}


@pytest.fixture
def driver(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "weft"))
    for name in [name for name in fingerprint.os.environ if name.startswith("TRITON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    fingerprint._versions.cache_clear()
    yield stand_in(monkeypatch)
    fingerprint._versions.cache_clear()


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where a module of weft may be that only a test knows."""
    monkeypatch.setattr(weft, "__path__", [*weft.__path__, str(tmp_path / "more")])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is known by size and second alone
    yield tmp_path / "more"
    forget()


def forget():
    """As in a process of its own."""
    for name in ("weft.helpers_of_a_test", "weft.kernel_of_a_test"):
        sys.modules.pop(name, None)
        generated.as_loaded.pop(name, None)
    generated.load.cache_clear()
    importlib.invalidate_caches()


def save(name, text):
    files.write(pathlib.Path(weft.__path__[1]) / f"{name}.py", text.encode())


def printed(helpers=HELPERS, kernel=KERNEL):
    """A function of a generated module."""
    forget()
    save("helpers_of_a_test", helpers)
    return generated.Jitted(
        "some_kernel", lambda: kernel, lambda: generated.load("kernel_of_a_test", kernel)
    )


def written(helpers=HELPERS, kernel=KERNEL):
    """A function of a module that was not imported."""
    forget()
    save("helpers_of_a_test", helpers)
    save("kernel_of_a_test", kernel)
    return generated.written.__wrapped__("weft.kernel_of_a_test", "some_kernel")


def live(helpers=HELPERS, kernel=KERNEL):
    """A function that Triton has made."""
    return written(helpers, kernel).function()


def arguments(n=100, dtype=torch.float32, shift=0, block=128):
    x = torch.zeros(64 + shift, dtype=dtype)
    return x[shift:], torch.zeros(64), n, block


def key(kernel, given=None, **options):
    return fingerprint.key(kernel, given or arguments(), OPTIONS | options)


# what code follows from is in its key


@pytest.mark.parametrize("make", [printed, written, live])
def test_the_text_of_what_is_called_is_in_the_key(make, driver, monkeypatch):
    keys = {
        key(make(helpers, kernel))
        for helpers, kernel in [
            (HELPERS, KERNEL),
            (HELPERS.replace("constexpr(2)", "constexpr(3)"), KERNEL),
            (HELPERS.replace("x * FACTOR", "x / FACTOR"), KERNEL),
            (HELPERS.replace("scaled(x) + 1", "scaled(x) + 2"), KERNEL),
            (HELPERS, KERNEL.replace("other=0.0", "other=1.0")),
        ]
    }
    assert len(keys) == 5
    assert None not in keys


def test_what_is_changed_while_the_process_runs_is_in_the_key(driver, monkeypatch):
    kernel = live()
    before = key(kernel)
    helpers = sys.modules["weft.helpers_of_a_test"]
    monkeypatch.setattr(helpers, "FACTOR", triton.language.constexpr(3))
    assert None is not key(kernel) != before


@pytest.mark.parametrize("make", [printed, written])
@pytest.mark.parametrize("value", [triton.language.constexpr(3), 2, [2], None])
def test_no_key_where_a_module_is_not_what_its_text_says(make, value, driver, monkeypatch):
    kernel = make()
    before = key(kernel)
    kernel.function()
    assert key(kernel) == before is not None
    helpers = sys.modules["weft.helpers_of_a_test"]
    with monkeypatch.context() as replaced:
        replaced.setattr(helpers, "FACTOR", value)
        assert key(kernel) is None
    with monkeypatch.context() as replaced:
        replaced.setattr(helpers.FACTOR, "value", 3)
        assert key(kernel) is None
    assert key(kernel) == before
    monkeypatch.delitem(sys.modules, "weft.helpers_of_a_test")
    importlib.import_module("weft.helpers_of_a_test")  # by somebody who may have changed it
    assert key(kernel) is None


def test_code_is_not_stored_where_a_text_changes_meanwhile(driver, monkeypatch, asked):
    run = generated.Jitted.run

    def edited(*given, **options):
        save("helpers_of_a_test", HELPERS.replace("+ 1", "+ 3"))
        return run(*given, **options)

    monkeypatch.setattr(generated.Jitted, "run", edited)
    first_call()
    assert len(asked) == 1
    assert not (files.home() / "machine").exists()


def test_versions_device_and_options_are_in_the_key(driver, monkeypatch):
    kernel = printed()
    keys = {key(kernel), key(kernel, num_warps=8), key(kernel, num_stages=2)}
    monkeypatch.setattr(fingerprint, "_device", lambda: "sm_100")
    keys.add(key(kernel))
    monkeypatch.setattr(torch, "__version__", "0")
    fingerprint._versions.cache_clear()
    keys.add(key(kernel))
    monkeypatch.setattr("weft.__version__", "0")
    fingerprint._versions.cache_clear()
    keys.add(key(kernel))
    assert len(keys) == 6
    assert None not in keys


@pytest.mark.parametrize("part", ["__init__.py", "compiler/code_generator.py", "_C/libtriton.so"])
def test_a_file_of_triton_that_changes_is_in_the_key(part, driver, monkeypatch, tmp_path):
    package = tmp_path / "triton"
    for name in ("__init__.py", "compiler/code_generator.py", "_C/libtriton.so"):
        files.write(package / name, b"1")
    monkeypatch.setattr(
        fingerprint.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"origin": str(package / "__init__.py")}),
    )
    before = fingerprint._versions()
    fingerprint._versions.cache_clear()
    assert fingerprint._versions() == before
    files.write(package / part, b"22")
    fingerprint._versions.cache_clear()
    assert fingerprint._versions() != before


def test_arguments_are_told_apart_as_triton_does_it():
    backend = CUDABackend(triton.backends.compiler.GPUTarget("cuda", 90, 32))
    at = torch.zeros(64, dtype=torch.uint8)
    values = [None, 1, 2, 16, 17, 0, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31) - 1, 2**63]
    values += [at, at[1:], at[16:], at.view(torch.float16), at.view(torch.int64)]
    for one, other in itertools.combinations(values, 2):
        told, ours = (
            [ask(v) for v in (one, other)]
            for ask in (
                lambda v: native_specialize_impl(CUDABackend, v, False, True, True),
                lambda v: fingerprint._kind(v, loose=False),
            )
        )
        assert (told[0] == told[1]) == (ours[0] == ours[1]), (one, other, backend)


def test_sizes_of_one_kind_share_their_code(driver, monkeypatch):
    kernel = printed()
    assert key(kernel, arguments(n=100)) == key(kernel, arguments(n=2**30 + 1))
    different = [arguments(n=1), arguments(n=16), arguments(n=2**31), arguments(block=64)]
    different += [arguments(dtype=torch.float16), arguments(shift=1), arguments()]
    assert len({key(kernel, given) for given in different}) == len(different)


def test_parameters_are_read_as_triton_reads_them(driver, monkeypatch):
    kernel = printed()
    assert kernel.arg_names == kernel.function().arg_names
    assert kernel.constexprs == kernel.function().constexprs == [3]


def test_every_kernel_by_hand_has_a_key(monkeypatch):
    folder = pathlib.Path(weft.__file__).parent
    names = [".".join(path.relative_to(folder).parts)[:-3] for path in folder.rglob("*_kernels.py")]
    names += [f"{family}.kernels" for family in ("clifford", "o3", "products", "reductions")]
    modules = [importlib.import_module(f"weft.{name}") for name in (*names, "voxels.kernels")]
    found = [
        f
        for module in modules
        for f in vars(module).values()
        if isinstance(f, triton.runtime.JITFunction) and f.__module__ == module.__name__
    ]
    assert len(found) > 60
    monkeypatch.setattr(fingerprint, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(fingerprint, "as_loaded", {})
    for function in found:
        text = generated.written(function.__module__, function.__name__)
        assert list(fingerprint._made_of(function))
        assert list(fingerprint._made_of(text))
        assert (text.arg_names, text.constexprs) == (function.arg_names, function.constexprs)


@pytest.mark.parametrize(
    ("kind", "f", "w"),
    [
        ("sums", node("exp", -DISTANCE) * var(2, 1, 1), None),
        ("shifted", -DISTANCE, var(2, 1, 1)),
        ("smallest", DISTANCE, None),
    ],
)
@pytest.mark.parametrize("ranged", [False, True])
def test_every_kernel_of_a_reduction_has_a_key(kind, f, w, ranged, monkeypatch):
    monkeypatch.setattr(fingerprint, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(fingerprint, "as_loaded", {})
    text = launch.source(kind, f, w, k=4, ranged=ranged)
    kernel = generated.printed(f"reductions_{kind}", text, f"{kind}_kernel")
    assert list(fingerprint._made_of(kernel))
    assert kernel.arg_names == kernel.function().arg_names
    assert kernel.constexprs == kernel.function().constexprs


# there is no key where it could say too little


@pytest.mark.parametrize(
    "text",
    [
        KERNEL.replace("import triton\n", "import triton\nimport numpy\n", 1),
        KERNEL.replace("from weft.helpers_of_a_test", "from tests.helpers", 1),
        KERNEL.replace("import triton\n", "import triton, numpy\n", 1),
        KERNEL + "\n\nfrom weft import helpers_of_a_test\n",
        KERNEL.replace("weft.helpers_of_a_test", "weft.no_such_module"),
    ],
)
def test_no_key_for_what_is_imported_in_another_way(text, driver, monkeypatch):
    assert key(printed(kernel=text)) is None


def test_no_key_for_values_of_another_kind(driver, monkeypatch):
    kernel = live()
    helpers = sys.modules["weft.helpers_of_a_test"]
    for value in (object(), [2], torch):
        monkeypatch.setattr(helpers, "FACTOR", value)
        assert key(kernel) is None
    assert key(printed(), (*arguments()[:3], object())) is None
    assert key(object()) is None


def variables():
    knobs = [vars(type(getattr(triton.knobs, group))).values() for group in fingerprint.KNOBS]
    known = [k.key for k in itertools.chain(*knobs) if isinstance(k, triton.knobs.env_base)]
    known = [k if k.isupper() else f"TRITON_{k.upper()}_PATH" for k in known]
    return [*known, "MLIR_ENABLE_DUMP", "LLVM_IR_ENABLE_DUMP", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3"]


@pytest.mark.parametrize("name", sorted({n.replace("-", "_") for n in variables()}))
def test_a_variable_of_triton_changes_the_key_or_leaves_none(name, driver, monkeypatch):
    kernel = printed()
    before = key(kernel)
    monkeypatch.setenv(name, "/1")
    assert before is not None
    assert key(kernel) != before


def test_no_key_while_knobs_are_turned(driver, monkeypatch):
    kernel = printed()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda **_: None
        assert key(kernel) is None
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **_: None
        assert key(kernel) is None
    assert key(kernel) is not None


# files


CODE = code_cache.Code("name", bytes(range(256)) * 4, 8, 49_153, (0, 2), "<Qi4x")


def test_what_is_stored_is_read(driver):
    code_cache.store("one", CODE)
    assert code_cache.exists("one")
    assert code_cache.read("one") == CODE
    assert code_cache.read("two") is None


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
    code_cache.store("one", CODE)
    path = files.home() / "machine" / "one"
    path.write_bytes(damage(path.read_bytes()))
    assert code_cache.read("one") is None
    code_cache.store("one", CODE)
    assert code_cache.read("one") == CODE


def test_a_file_of_another_key_is_as_good_as_none(driver):
    code_cache.store("one", CODE)
    folder = files.home() / "machine"
    (folder / "one").rename(folder / "two")
    assert code_cache.read("two") is None


def test_a_disk_that_takes_nothing_costs_only_time(driver, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    code_cache.store("one", CODE)
    assert code_cache.read("one") is None


def test_writers_and_readers_at_once(driver):
    found = []

    def write():
        for _ in range(50):
            code_cache.store("one", CODE)

    def read():
        found.extend(code_cache.read("one") for _ in range(200))

    code_cache.store("one", CODE)
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
    """How often Triton was asked."""
    found, run = [], generated.Jitted.run
    monkeypatch.setattr(
        generated.Jitted, "run", lambda self, *a, **o: found.append(1) or run(self, *a, **o)
    )
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
    for known in (False, True):
        kernels = [Kernel(printed(), (100,), (), Tile((block,), 4, 1)) for block in (64, 128)]
        compile_together([Call(kernel, tensors) for kernel in kernels])
        assert len(asked) == (4 if known else 2)
        for kernel in kernels:
            kernel(1, tensors)
    assert len(asked) == 4


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
    first = threads[:2]
    assert first == [threading.main_thread()] * 2


def test_code_that_only_triton_can_launch_is_not_stored(driver, monkeypatch, asked):
    monkeypatch.setattr(machine, "layout", lambda compiled: None)
    monkeypatch.setattr(machine, "_by_triton", lambda compiled: lambda *_: None)
    for _ in range(2):
        first_call()
    assert len(asked) == 2
    assert not (files.home() / "machine").exists()


CALL = """
import torch
from weft.reductions import gaussians, launch
from weft.reductions.formula import node, var
from weft.reductions.ranges import Options, Sizes
distance = node("sqdist", var(0, 3, 0), var(1, 3, 1))
values = {0: torch.zeros(1, 300, 3), 1: torch.zeros(1, 5000, 3)}
gaussians.processors = launch.processors = lambda device: 132
launch.sums(node("exp", -distance), values, Sizes(1, 300, 5000), None, Options("ieee"))
"""

ALONE = """
import sys
import torch
torch._C._cuda_getDevice = lambda: 0
from tests.contract.absent_gpu import without_triton
driver = without_triton(setattr)
{call}
assert "triton" not in sys.modules
print([name for name, code in driver.loaded])
"""


def test_a_process_that_finds_its_code_does_not_import_triton(driver, monkeypatch):
    for module in (gaussians, launch):
        monkeypatch.setattr(module, "processors", module.processors)
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(fingerprint, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(fingerprint, "as_loaded", {})
    exec(CALL, {})
    names = [name for name, _ in driver.loaded]
    assert names == ["sums_kernel", "merge_sums_kernel"]
    command = [sys.executable, "-c", ALONE.format(call=CALL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(names)
