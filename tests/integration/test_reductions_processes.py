"""Reductions in other processes: after a fork, after a spawn, two that compile the same formula at
once into one empty cache; and the memory that one needs.

Seen red with: modules written in place and not renamed into it, the matrix of the pairs made whole.
"""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.multiprocessing

from tests.conftest import INTERPRETED
from tests.nearness import same
from torchweft.reductions import Genred

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="processes do not depend on the backend"),
]

GAUSSIAN = Genred("Exp(-SqDist(x, y)) * b", ["x = Vi(3)", "y = Vj(3)", "b = Vj(1)"], axis=1)
SECONDS = 100


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(50, d, generator=generator, dtype=torch.float64) for d in (3, 3, 1)]


def reduce_into(path, backend):
    x, y, b = (t.requires_grad_() for t in inputs())
    found = GAUSSIAN(x, y, b, backend=backend)
    torch.save([found.detach(), *torch.autograd.grad(found.sum(), (x, y, b))], path)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_spawned_child_computes_as_its_parent(backend, tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=reduce_into, args=(tmp_path / "child", backend))
    child.start()
    child.join(SECONDS)
    assert child.exitcode == 0
    reduce_into(tmp_path / "parent", backend)
    same(torch.load(tmp_path / "child"), torch.load(tmp_path / "parent"))


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_forked_child_computes_as_its_parent(backend, tmp_path):
    """Forked after the import; with our own threads, after a computation too.

    Torch's threads are lost in a fork: its own products of matrices then wait for ever.
    """
    program = f"""
        import os
        from tests.integration.test_reductions_processes import reduce_into
        if {backend!r} == "numba":
            reduce_into({str(tmp_path / "before")!r}, "numba")
        pid = os.fork()
        reduce_into({str(tmp_path)!r} + ("/parent" if pid else "/child"), {backend!r})
        assert not pid or os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    """
    finished(started(program))
    same(torch.load(tmp_path / "child"), torch.load(tmp_path / "parent"))


def started(program, **environment):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **streams)


def finished(process):
    printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return printed


def test_processes_that_compile_at_once(tmp_path):
    program = """
        import torch
        from torchweft.reductions import Genred
        g = Genred("Exp(-SqDist(x, y)) * b", ["x = Vi(3)", "y = Vj(3)", "b = Vj(1)"], axis=1)
        generator = torch.Generator().manual_seed(0)
        given = [torch.rand(50, d, generator=generator, dtype=torch.float64) for d in (3, 3, 1)]
        print(g(*given, backend="numba").sum().item().hex())
    """
    processes = [started(program, TORCHWEFT_CACHE_DIR=str(tmp_path)) for _ in range(3)]
    expected = GAUSSIAN(*inputs(), backend="numba").sum().item().hex()
    assert [finished(p).strip() for p in processes] == [expected] * 3
    written = [path.name for path in (tmp_path / "machine").iterdir()]
    assert len(written) == 2  # the loop, and that of its columns
    assert {len(name) for name in written} == {64}  # no file that somebody else was writing


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_memory_is_that_of_the_results(backend):
    """20,000 × 20,000 pairs are 1.6 GB in float32: the peak rises by less than a fifth of that."""
    program = f"""
        import resource
        import torch
        from torchweft.reductions import Genred
        g = Genred("Exp(-SqDist(x, y)) * b", ["x = Vi(3)", "y = Vj(3)", "b = Vj(1)"], axis=1)
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        def call(n):
            g(torch.rand(n, 3), torch.rand(n, 3), torch.rand(n, 1), backend={backend!r})
        call(1000)
        before = peak()
        call(20_000)
        print(peak() - before)
    """
    assert int(finished(started(program))) < 1600 / 5
