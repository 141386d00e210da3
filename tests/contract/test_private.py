"""Private names of torch, Triton and numba do what torchweft uses them for.

A failure after an upgrade: find what took the name's place in the new version, change
src/torchweft/core/private.py or private_compilers.py alone, and keep the check here.
"""

import ctypes
import inspect
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft.core import private, private_compilers

ADVICE = "changed its meaning: find its successor, and bind that in torchweft/core/private.py"


def test_any_autocast():
    assert not private.any_autocast(), f"_is_any_autocast_enabled {ADVICE}"
    with torch.autocast("cpu"):
        assert private.any_autocast(), f"_is_any_autocast_enabled {ADVICE}"


@pytest.mark.parametrize(
    "register", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_of_modules(register):
    module = torch.nn.Linear(1, 1)
    assert not private.is_hooked(module), f"a module's dictionary of hooks {ADVICE}"
    handle = getattr(module, f"register_{register}")(lambda *_: None)
    assert private.is_hooked(module), f"a module's dictionary of hooks {ADVICE}"
    handle.remove()
    assert not private.is_hooked(module), f"a module's dictionary of hooks {ADVICE}"


def test_hooks_of_all_modules_and_a_forward_of_one():
    module, hooks = torch.nn.Linear(1, 1), torch.nn.modules.module
    handle = hooks.register_module_forward_hook(lambda *_: None)
    assert private.is_hooked(module), f"_has_any_global_hook {ADVICE}"
    handle.remove()
    assert not private.is_hooked(module), f"_has_any_global_hook {ADVICE}"
    module.forward = torch.nn.Identity().forward
    assert private.is_hooked(module), f"a module's attributes {ADVICE}"


def test_dispatch_modes():
    assert private.dispatch_modes() == 0, f"_len_torch_dispatch_stack {ADVICE}"
    with TorchDispatchMode():
        assert private.dispatch_modes() == 1, f"_len_torch_dispatch_stack {ADVICE}"


def test_transforms_and_their_wrappers():
    """Active in a transform, not where the stack is cleared; wrappers give back their tensors."""
    seen = []

    def f(x):
        seen.append((private.transforms_active(), private.functorch.is_batchedtensor(x)))
        inside = private.functorch.get_unwrapped(x)
        seen.append(private.functorch.is_functorch_wrapped_tensor(inside))
        with private.temporarily_clear_interpreter_stack():
            seen.append(private.transforms_active())
        return x

    torch.func.vmap(f)(torch.ones(2))
    assert not private.transforms_active(), f"_are_functorch_transforms_active {ADVICE}"
    assert seen == [(True, True), False, False], f"torch._C._functorch {ADVICE}"


def test_trees():
    """Paths name the keys of dicts and the numbers of items."""
    leaves, structure = private.flatten(({"a": 1}, [2, 3]))
    assert private.unflatten(leaves, structure) == ({"a": 1}, [2, 3]), f"tree_flatten {ADVICE}"
    paths = [path for path, _ in private.flatten_with_path(({"a": 1}, [2, 3]))[0]]
    keys = [[getattr(key, "key", getattr(key, "idx", None)) for key in path] for path in paths]
    assert keys == [[0, "a"], [1, 0], [1, 1]], f"tree_flatten_with_path {ADVICE}"


def test_foreach_copy():
    targets, sources = [torch.zeros(2), torch.zeros(3, 1)], [torch.ones(2), torch.ones(3, 1)]
    private.foreach_copy(targets, sources)
    assert all((t == 1).all() for t in targets), f"_foreach_copy_ {ADVICE}"


def test_dispatch_mode():
    """It sees operations that write, with the schema that says so."""
    seen = []

    class Watch(private.DispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            aliases = [argument.alias_info for argument in function._schema.arguments]
            seen.append([alias is not None and alias.is_write for alias in aliases])
            return function(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2).add_(1)
        torch._foreach_add_([torch.ones(2)], 1)
    assert seen[1] == [True, False, False], f"TorchDispatchMode {ADVICE}"
    assert seen[3][0], f"TorchDispatchMode {ADVICE}"


def test_will_execute():
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            seen.extend(private.will_execute(node) for node, _ in ctx.next_functions)
            return grad, grad

    x, y = (torch.ones(2, requires_grad=True) * 2 for _ in range(2))
    torch.autograd.grad(Watched.apply(x * 3, y * 3).sum(), x)
    assert seen == [True, False], f"_will_engine_execute_node {ADVICE}"


def test_eval_frame():
    frame = private.eval_frame._FrameAction.SKIP
    strategy = private.eval_frame._FrameExecStrategy(frame, frame)
    private.eval_frame.set_code_exec_strategy((lambda: 0).__code__, strategy)


@pytest.mark.parametrize("name", private_compilers.NAMES)
def test_names_that_are_imported(name):
    """They are there, and take what core/gpu/compiler.py gives them."""
    pytest.importorskip(private_compilers.NAMES[name].partition(".")[0])
    found = getattr(private_compilers, name)
    takes = {"create_function_from_signature": 3, "make_backend": 1, "GPUTarget": 3}
    if name in takes:
        count = len(inspect.signature(found).parameters)
        assert count == takes[name], f"{name} takes {count} arguments: {ADVICE}"
    elif name == "ir":
        assert callable(found.context), f"{name} {ADVICE}"
        assert callable(found.load_dialects), f"{name} {ADVICE}"
    elif name == "driver":
        assert "active" in dir(type(found)), f"{name} {ADVICE}"
    elif name == "make_array":
        types = pytest.importorskip("numba").types
        assert found(types.float64[::1])._fe_type.ndim == 1, f"{name} {ADVICE}"
    else:
        assert callable(found.make_ir), f"{name} {ADVICE}"


def test_kernels_pack_their_arguments():
    """`_pack_args` of a kernel takes what `pack_args` gives, and itself."""
    jit = pytest.importorskip("triton.runtime.jit")
    parameters = inspect.signature(jit.JITFunction._pack_args).parameters
    assert len(parameters) == 6, f"_pack_args {ADVICE}"


def test_forward_derivatives_are_seen():
    assert private.forward_level() == -1, f"forward_ad._current_level {ADVICE}"
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_level() == 0, f"forward_ad._current_level {ADVICE}"


def test_arguments_of_to():
    device, dtype, *_ = private.parse_to("cpu", torch.float64)
    assert (device, dtype) == (torch.device("cpu"), torch.float64), f"_parse_to {ADVICE}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_and_stream():
    assert private.get_device() == torch.cuda.current_device(), f"_cuda_getDevice {ADVICE}"
    stream = torch.cuda.current_stream().cuda_stream
    assert private.raw_stream(private.get_device()) == stream, f"getCurrentRawStream {ADVICE}"


def test_triton_and_numba_are_imported_when_used():
    code = (
        "import sys, torchweft.core.private_compilers\n"
        "assert not {'triton', 'numba', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = private_compilers.no_such_name


@pytest.mark.parametrize("counted", [True, False])
def test_a_stashed_value_is_counted_once(counted, monkeypatch):
    """Seen red on torch 2.11, which takes no reference: the value was freed under its owner."""
    plain = torch._C._stash_obj_in_tls

    def stolen(name, value):
        plain(name, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    value = object()
    before = sys.getrefcount(value)
    if not counted and not torch.__version__.startswith("2.11"):
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stolen)
    private.stash("a test", value)
    assert sys.getrefcount(value) == before + 1
    monkeypatch.undo()
    private.stash("a test", None)
    assert sys.getrefcount(value) == before


def test_stashed_values_belong_to_a_thread_and_to_autograds():
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(private.stashed("a test"))
            return grad

    seen, device = [], "cuda" if torch.cuda.is_available() else "cpu"
    assert private.stashed("a test") is None
    private.stash("a test", "value")
    try:
        Seen.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
        thread = threading.Thread(target=lambda: seen.append(private.stashed("a test")))
        thread.start()
        thread.join()
        private.stash("a test", None)
        assert seen == ["value", None], f"_stash_obj_in_tls {ADVICE}"
    finally:
        private.stash("a test", None)
    assert private.stashed("a test") is None


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_groups_are_found_by_their_names(tmp_path):
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        for group in (None, distributed.new_group([0])):
            name = private.group_name(group)
            assert private.process_group(name) is (group or distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
