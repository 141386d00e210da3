"""The first call compiles at once what it is about to call, for the very dtypes that it then has.

Nothing runs on a GPU: machine code is a stub that notes its arguments.  Seen red with: parts of
sums in the tensors' dtype, folds that are not announced.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from weft.core import launcher
from weft.o3 import Graph, launch
from weft.testing.o3_workloads import calls, conv, rows

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

STRUCTURE = conv(((128, 0), (32, 1)), (0, 1))


def signature(kernel, arguments):
    """What machine code depends on: dtypes, which tensors are None, constants."""
    return [kernel, *(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)]


@pytest.fixture
def seen(monkeypatch):
    announced, compiled = [], []

    def machine_code(kernel, arguments, options):
        compiled.append(signature(kernel, arguments))
        return lambda programs, stream, values: None

    def in_threads(calls):
        for kernel, tensors, free in calls:
            announced.append(signature(kernel._kernel, (*tensors, *free, *kernel._arguments)))

    monkeypatch.setattr(launcher, "machine_code", machine_code)
    monkeypatch.setattr(launcher, "_compile_in_threads", in_threads)
    monkeypatch.setattr(launcher, "_current_stream", lambda: 0)
    monkeypatch.setattr(launcher, "_made", set())
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(launch, "_processors", lambda device: 132)
    return announced, compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", calls())
@pytest.mark.parametrize("edges", [40, 9000])  # more than a piece of a row
def test_what_is_compiled_ahead_is_what_is_called(edges, order, dtype, seen):
    announced, compiled = seen
    src, dst = torch.arange(edges) % 3, torch.arange(edges) % 2
    tables = Graph(src, dst, 3).tables
    call = calls()[order]
    launch.run(STRUCTURE, call, rows(STRUCTURE, call, tables, False, dtype), tables, False)
    assert len(announced) > 1
    for made in announced:
        assert made in compiled
    assert {made[0] for made in compiled} == {made[0] for made in announced}
