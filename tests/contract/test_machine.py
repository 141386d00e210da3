"""Arguments of machine code, as the driver reads them, against a driver that writes them down.

Seen red with: slots of four bytes, values taken by the place among those that are not constants, a
frame that two threads share, scratch pointers left out.
"""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from torchweft.core import private
from torchweft.core.gpu import compiler
from torchweft.core.gpu import driver as machine
from torchweft.errors import BackendError

KINDS = {"a": "*fp16", "none": "constexpr", "n": "i32", "one": "constexpr", "m": "i64", "s": "fp32"}
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Config(ctypes.Structure):
    """As cuda.h declares it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def code(**other):
    """Compiled code, as far as the launcher looks at it."""
    meta = {
        "target": SimpleNamespace(backend="cuda"),
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_warps": 8,
        "shared": 1024,
    }
    found = {"name": "kernel", "src": SimpleNamespace(signature=KINDS), "asm": {"cubin": b"code"}}
    return SimpleNamespace(**found, metadata=SimpleNamespace(**meta | other))


def read(address: int, kind) -> object:
    return kind.from_address(address).value


def driver(calls: list, status: int = 0):
    def launch(config, function, parameters, extra):
        given = Config.from_address(config)
        assert (list(given.block[1:]), given.attributes, given.count) == ([1, 1], None, 0)
        at = (ctypes.c_void_p * 6).from_address(parameters)
        types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float)
        values = [read(a, kind) for a, kind in zip(at, types, strict=False)]
        scratch = [read(a, ctypes.c_uint64) for a in at[4:]]
        block = given.block[0], given.shared, given.stream
        calls.append((function, tuple(given.grid), *block, values, scratch))
        return status

    def explain(status, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"said why"

    return SimpleNamespace(cuLaunchKernelEx=LAUNCH(launch), cuGetErrorString=explain)


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(machine, "_driver", lambda: driver(made))
    monkeypatch.setattr(machine, "_loaded", lambda code: 1 << 40)
    return made


def test_the_driver_reads_every_argument(calls):
    run = machine._by_driver(compiler.code_of(code()))
    run(7, 1 << 41, (1 << 47, None, -5, 1, -(1 << 40), 0.5, 128))
    run(2**31 - 1, 0, (0, None, 2**31 - 1, 1, 2**62, -1.0, 128))
    assert calls == [
        (1 << 40, (7, 1, 1), 256, 1024, 1 << 41, [1 << 47, -5, -(1 << 40), 0.5], [0, 0]),
        (1 << 40, (2**31 - 1, 1, 1), 256, 1024, None, [0, 2**31 - 1, 2**62, -1.0], [0, 0]),
    ]


def test_threads_do_not_share_arguments(calls):
    run = machine._by_driver(compiler.code_of(code()))

    def many(number):
        for i in range(500):
            run(number, 0, (number, None, number, 1, number, float(number), i))

    threads = [threading.Thread(target=many, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1500
    assert all(values == [grid[0]] * 4 for _, grid, _, _, _, values, _ in calls)


@pytest.mark.parametrize(
    "other",
    [
        {"global_scratch_size": 8},
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"target": SimpleNamespace(backend="hip")},
    ],
)
def test_triton_launches_what_the_driver_call_does_not_know(other):
    assert compiler.layout(code(**other)) is None


def test_a_refused_launch_raises(monkeypatch):
    monkeypatch.setattr(machine, "_driver", lambda: driver([], 700))
    monkeypatch.setattr(machine, "_loaded", lambda code: 1)
    run = machine._by_driver(compiler.code_of(code()))
    with pytest.raises(BackendError, match=r"refused to launch kernel \(error 700: said why\)"):
        run(1, 0, (0, None, 0, 1, 0, 0.0, 0))


def test_a_thread_without_a_context_takes_torch_s(monkeypatch):
    """Seen red without the second launch."""
    entered, calls = [], []
    refusing, serving = driver([], machine.NO_CONTEXT), driver(calls)
    fake = SimpleNamespace(
        cuLaunchKernelEx=lambda *given: (serving if entered else refusing).cuLaunchKernelEx(*given),
        cuDevicePrimaryCtxRetain=lambda context, device: 0,
        cuCtxSetCurrent=entered.append,
    )
    monkeypatch.setattr(machine, "_driver", lambda: fake)
    monkeypatch.setattr(machine, "_loaded", lambda code: 1)
    monkeypatch.setattr(private, "get_device", lambda: 0)
    machine._by_driver(compiler.code_of(code()))(7, 0, (0, None, 0, 1, 0, 0.0, 0))
    assert (len(entered), len(calls)) == (1, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_both_ways_launch_the_same():
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, y_ptr, n, scale, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0) * scale, mask=i < n)

    x, found = torch.randn(100, device="cuda"), []
    for door in (lambda code: machine._by_driver(compiler.code_of(code)), machine._by_triton):
        y = torch.zeros_like(x)
        made = kernel.run(x, y, 99, 2.5, 128, grid=(1,), warmup=True)
        values = (x.data_ptr(), y.data_ptr(), 99, 2.5, 128)
        door(made)(1, torch.cuda.current_stream().cuda_stream, values)
        found.append(y)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    torch.testing.assert_close(found[0][:99], x[:99] * 2.5, rtol=0, atol=0)
