"""The first call compiles at once what it is about to call, for the very dtypes that it then has.

Nothing runs on a GPU: machine code is a stub that notes its arguments.  Seen red with: parts of
sums in the tensors' dtype, folds that are not announced.
"""

import pytest
import torch

from tests.cases.o3_workloads import calls, conv, rows
from tests.conftest import INTERPRETED
from tests.contract.announced import watch
from torchweft.o3 import Graph
from torchweft.o3.channelwise.gpu import launch

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

STRUCTURE = conv(((128, 0), (32, 1)), (0, 1))


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(launch, "_recipes", {})
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    return watch(monkeypatch.setattr)


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
