"""Keys of machine code: whatever code follows from changes them, or leaves none.

Seen red with: a key without the functions that are called, without constants, without versions,
without the width or the alignment of an argument; a key although Triton is being debugged, or
although a module is not what its text says.
"""

import importlib
import itertools
import pathlib
import sys

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

import torchweft
from tests.conftest import INTERPRETED
from tests.contract.some_kernel import HELPERS, KERNEL, a_process, arguments, live, printed, written
from torchweft.core import files
from torchweft.core.gpu import binaries
from torchweft.core.printing import modules as generated
from torchweft.reductions.formula.node import node, var
from torchweft.reductions.gpu import launch

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

DISTANCE = node("sqdist", var(0, 3, 0), var(1, 3, 1))
OPTIONS = {"num_warps": 4, "num_stages": 1}


@pytest.fixture
def driver(monkeypatch, tmp_path):
    yield from a_process(monkeypatch, tmp_path)


def key(kernel, given=None, **options):
    return binaries.key(kernel, given or arguments(), OPTIONS | options)


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


def test_no_key_for_a_function_in_a_module_that_was_changed(driver, monkeypatch):
    """What such a function does cannot be read in the text of its module."""
    kernel = live()
    assert key(kernel) is not None
    module = sys.modules["torchweft.kernel_of_a_test"]
    monkeypatch.setattr(module, "changed", module.some_kernel)
    assert key(kernel) is None


@pytest.mark.parametrize("make", [printed, written, live])
@pytest.mark.parametrize("value", [triton.language.constexpr(3), 2, [2], None])
def test_no_key_where_a_module_is_not_what_its_text_says(make, value, driver, monkeypatch):
    kernel = make()
    before = key(kernel)
    if make is not live:
        kernel.function()
    assert key(kernel) == before is not None
    helpers = sys.modules["torchweft.helpers_of_a_test"]
    with monkeypatch.context() as replaced:
        replaced.setattr(helpers, "FACTOR", value)
        assert key(kernel) is None
    with monkeypatch.context() as replaced:
        replaced.setattr(helpers.FACTOR, "value", 3)
        assert key(kernel) is None
    assert key(kernel) == before
    monkeypatch.delitem(sys.modules, "torchweft.helpers_of_a_test")
    importlib.import_module("torchweft.helpers_of_a_test")  # by somebody who may have changed it
    assert key(kernel) is None


def test_versions_device_and_options_are_in_the_key(driver, monkeypatch):
    kernel = printed()
    keys = {key(kernel), key(kernel, num_warps=8), key(kernel, num_stages=2)}
    monkeypatch.setattr(binaries, "device", lambda: "sm_100")
    keys.add(key(kernel))
    monkeypatch.setattr(torch, "__version__", "0")
    binaries._versions.cache_clear()
    keys.add(key(kernel))
    monkeypatch.setattr("torchweft.__version__", "0")
    binaries._versions.cache_clear()
    keys.add(key(kernel))
    assert len(keys) == 6
    assert None not in keys


@pytest.mark.parametrize("part", ["__init__.py", "compiler/code_generator.py", "_C/libtriton.so"])
def test_a_file_of_triton_that_changes_is_in_the_key(part, driver, monkeypatch, tmp_path):
    package = tmp_path / "triton"
    for name in ("__init__.py", "compiler/code_generator.py", "_C/libtriton.so"):
        files.write(package / name, b"1")
    monkeypatch.setattr(
        binaries.importlib.util,
        "find_spec",
        lambda name: type("Spec", (), {"origin": str(package / "__init__.py")}),
    )
    before = binaries._versions()
    binaries._versions.cache_clear()
    assert binaries._versions() == before
    files.write(package / part, b"22")
    binaries._versions.cache_clear()
    assert binaries._versions() != before


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
                lambda v: binaries._kind(v, loose=False),
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
    folder = pathlib.Path(torchweft.__file__).parent
    names = [".".join(path.relative_to(folder).parts)[:-3] for path in folder.rglob("*kernels.py")]
    modules = [importlib.import_module(f"torchweft.{name}") for name in names]
    found = [
        f
        for module in modules
        for f in vars(module).values()
        if isinstance(f, triton.runtime.JITFunction) and f.__module__ == module.__name__
    ]
    assert len(found) > 60
    monkeypatch.setattr(binaries, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(binaries, "as_loaded", {})
    for function in found:
        text = generated.written(function.__module__, function.__name__)
        assert list(binaries._made_of(function))
        assert list(binaries._made_of(text))
        assert (text.arg_names, text.constexprs) == (function.arg_names, function.constexprs)
        assert text.loose == {p.num for p in function.params if p.do_not_specialize}


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
    monkeypatch.setattr(binaries, "state", lambda module: None)  # others import modules too
    monkeypatch.setattr(binaries, "as_loaded", {})
    text = launch.source(kind, f, w, k=4, ranged=ranged)
    kernel = generated.printed(f"reductions_{kind}", text, f"{kind}_kernel")
    assert list(binaries._made_of(kernel))
    assert kernel.arg_names == kernel.function().arg_names
    assert kernel.constexprs == kernel.function().constexprs


# there is no key where it could say too little


@pytest.mark.parametrize(
    "text",
    [
        KERNEL.replace("import triton\n", "import triton\nimport numpy\n", 1),
        KERNEL.replace("from torchweft.helpers_of_a_test", "from tests.helpers", 1),
        KERNEL.replace("import triton\n", "import triton, numpy\n", 1),
        KERNEL + "\n\nfrom torchweft import helpers_of_a_test\n",
        KERNEL.replace("torchweft.helpers_of_a_test", "torchweft.no_such_module"),
    ],
)
def test_no_key_for_what_is_imported_in_another_way(text, driver, monkeypatch):
    assert key(printed(kernel=text)) is None


def test_no_key_for_values_of_another_kind(driver, monkeypatch):
    kernel = live()
    helpers = sys.modules["torchweft.helpers_of_a_test"]
    for value in (object(), [2], torch):
        monkeypatch.setattr(helpers, "FACTOR", value)
        assert key(kernel) is None
    assert key(printed(), (*arguments()[:3], object())) is None
    assert key(object()) is None


def variables():
    knobs = [vars(type(getattr(triton.knobs, group))).values() for group in binaries.KNOBS]
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
