"""Ctrl-C ends a loop on the CPU between two of its runs, not at its end.

Seen red with: all tasks in a few runs, as it was, where a reduction of 150,000 × 150,000 went on
for 45 seconds; the other threads' runs going on after an interrupt.
"""

import signal
import threading
import time

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import clifford, o3, products
from torchweft.core.cpu import loops
from torchweft.o3.channelwise import numba_path as o3_path
from torchweft.products import numba_path as products_path
from torchweft.reductions import Vi, Vj
from torchweft.reductions.engine import numba_path as reductions_path

pytestmark = pytest.mark.skipif(INTERPRETED, reason="loops do not depend on the interpreter")

RUNS = 20
"""Least runs of the calls below, so that one run is at most a twentieth of the work."""


def sums():
    x, y = torch.rand(40_000, 3), torch.rand(100_000, 3)
    return lambda: (-Vi(x).sqdist(Vj(y))).exp().sum(1, backend="numba")


def logsumexp_of_long_rows():
    x, y = torch.rand(40, 3), torch.rand(10_000_000, 3)
    return lambda: (-Vi(x).sqdist(Vj(y)).atan()).logsumexp(1, backend="numba")


def smallest():
    x, y = torch.rand(40_000, 3), torch.rand(100_000, 3)
    return lambda: Vi(x).sqdist(Vj(y)).exp().argKmin(10, 1, backend="numba")


def multivectors():
    algebra = clifford.Algebra.cl(4, 1)
    x = torch.rand(32, 10_000, 256)
    return lambda: clifford.geometric_product(x, x, algebra, backend="numba")


def edges():
    conv = o3.TensorProductConv(
        "64x0e+64x1o",
        "0e+1o+2e",
        "64x0e+64x1o+64x2e",
        [(0, 0, 0, "uvu", False), (1, 1, 2, "uvu", False), (1, 2, 1, "uvu", False)],
        backend="numba",
    )
    x, y = torch.rand(1000, conv.irreps_in1.dim), torch.rand(800_000, 9)
    graph = o3.Graph(*torch.randint(0, 1000, (2, 800_000)), 1000)
    return lambda: conv(x, y, None, graph)


def products_of_rows():
    rows = torch.randint(0, 1000, (3, 1_000_000))
    infos = products.sparse_product_infos(*rows, in1_size=1000, in2_size=1000, out_size=1000)
    x = torch.rand(RUNS, 1000, 512)
    return lambda: products.sparse_mul(x, x, *infos)


CALLS = [sums, logsumexp_of_long_rows, smallest, multivectors, edges, products_of_rows]


@pytest.fixture
def threads(request):
    before, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(request.param)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    yield request.param
    torch.set_num_threads(before)
    signal.signal(signal.SIGINT, handler)


class Interrupter:
    """Adds the parts of long work; the caller's second step gets a Ctrl-C.

    Another thread waits for it in its first step, and is slow afterwards, so that the caller has
    the time to end the loop however busy the machine is.
    """

    def __init__(self):
        self.steps, self.begun, self.raised = 0, 0.0, threading.Event()

    def step(self, part):
        self.begun += part
        if threading.current_thread() is not threading.main_thread():
            assert self.raised.wait(60)
            time.sleep(0.5)
            return
        self.steps += 1
        if self.steps > 1:
            self.raised.set()
            signal.raise_signal(signal.SIGINT)


def watched_share(interrupter, share=loops.share):
    def watched(run, tasks, work, serial):
        def step(first, last):
            if min(tasks, work // loops.WORK_OF_A_RUN) >= RUNS:
                interrupter.step((last - first) / tasks)
            run(first, last)

        share(step, tasks, work, serial)

    return watched


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_ends_a_loop(call, threads, monkeypatch):
    """It arrives with the second run, so three quarters of the work never begin."""
    interrupter = Interrupter()
    for module in (loops, o3_path, products_path, reductions_path):
        monkeypatch.setattr(module, "share", watched_share(interrupter))
    long = call()
    with pytest.raises(KeyboardInterrupt):
        long()
    assert interrupter.begun < 1 / 4


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
