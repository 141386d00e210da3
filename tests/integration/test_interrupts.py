"""Ctrl-C ends a loop of numba between two of its runs, not at its end.

Seen red with: all tasks in a few runs, as it was, where a reduction of 150,000 × 150,000 went on
for 45 seconds; the other threads' runs going on after an interrupt.
"""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.core.cpu import loops

pytestmark = pytest.mark.skipif(INTERPRETED, reason="loops do not depend on the interpreter")

CALLS = {
    "sums": """
        from torchweft.reductions import Vi, Vj
        x, y = torch.rand(LARGE * 1000, 3), torch.rand(100_000, 3)

        def call(size):
            (-Vi(x[: size * 1000]).sqdist(Vj(y))).exp().sum(1, backend="numba")
        """,
    "logsumexp of long rows": """
        from torchweft.reductions import Vi, Vj
        x, y = torch.rand(LARGE, 3), torch.rand(10_000_000, 3)

        def call(size):
            (-Vi(x[:size]).sqdist(Vj(y)).atan()).logsumexp(1, backend="numba")
        """,
    "smallest": """
        from torchweft.reductions import Vi, Vj
        x, y = torch.rand(LARGE * 1000, 3), torch.rand(100_000, 3)

        def call(size):
            Vi(x[: size * 1000]).sqdist(Vj(y)).exp().argKmin(10, 1, backend="numba")
        """,
    "products": """
        from torchweft import products
        rows = torch.randint(0, 1000, (3, 100_000))
        infos = products.sparse_product_infos(*rows, in1_size=1000, in2_size=1000, out_size=1000)
        x = torch.rand(LARGE, 1000, 512)

        def call(size):
            products.sparse_mul(x[:size], x[:size], *infos)
        """,
    "multivectors": """
        from torchweft import clifford
        algebra = clifford.Algebra.cl(4, 1)
        x = torch.rand(32, LARGE * 100, 256)

        def call(size):
            given = x[:, : size * 100]
            clifford.geometric_product(given, given, algebra, backend="numba")
        """,
    "edges": """
        from torchweft import o3
        conv = o3.TensorProductConv(
            "64x0e+64x1o", "0e+1o+2e", "64x0e+64x1o+64x2e",
            [(0, 0, 0, "uvu", False), (1, 1, 2, "uvu", False), (1, 2, 1, "uvu", False)],
            backend="numba",
        )
        edges = LARGE * 20_000
        x, y = torch.rand(1000, conv.irreps_in1.dim), torch.rand(edges, 9)
        src, dst = torch.randint(0, 1000, (2, edges))

        def call(size):
            n = size * 20_000
            conv(x, y[:n], src=src[:n], dst=dst[:n])
        """,
}
"""Calls whose work grows with their size, which is LARGE at most."""

PROGRAM = """
    import os, signal, threading, time
    import torch
    torch.set_num_threads({threads})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    LARGE = {large}
    {call}

    def seconds(size):
        start = time.perf_counter()
        call(size)
        return time.perf_counter() - start

    seconds(1)  # compiles
    expected, sent = LARGE * seconds(1), []

    def interrupt():
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(expected / 20, interrupt).start()
    try:
        call(LARGE)
    except KeyboardInterrupt:
        print((time.perf_counter() - sent[0]) / expected)
"""


SHORT = ("sums", 2), ("products", 2)


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        pytest.param(name, threads, marks=() if (name, threads) in SHORT else pytest.mark.slow)
        for name in CALLS
        for threads in (1, 2)
    ],
)
def test_an_interrupt_ends_a_loop(name, threads):
    """It arrives after a twentieth of the work; a tenth of the work later the call has ended."""
    call = textwrap.dedent(CALLS[name])
    program = textwrap.dedent(PROGRAM).replace("{call}", call)
    program = program.replace("{threads}", str(threads)).replace("{large}", "40")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("serial", [0, loops.WORK_OF_A_RUN * 1000])
def test_work_is_cut_into_runs(two_threads, serial):
    done = []
    loops.share(lambda *run: done.append(run), 300, loops.WORK_OF_A_RUN * 100, serial)
    assert len(done) == 100
    assert [i for run in sorted(done) for i in range(*run)] == list(range(300))


def test_an_interrupt_ends_the_other_threads(two_threads):
    started, raised, begun = threading.Event(), threading.Event(), []

    def run(first, last):
        if threading.current_thread() is threading.main_thread():
            started.wait()
            raised.set()
            raise KeyboardInterrupt
        started.set()
        raised.wait()
        begun.append(first)
        time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        loops.share(run, 1000, loops.WORK_OF_A_RUN * 1000, 0)
    ended = len(begun)
    time.sleep(0.01)
    assert len(begun) == ended < 999
