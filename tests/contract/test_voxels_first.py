"""The first call compiles at once what it is about to call, for the very dtypes that it then has.

Nothing runs on a GPU: machine code is a stub that notes its arguments.  Seen red with: a table of
int64 where int32 stood for it, an order left out, a kernel that is not announced, the gradient of
the input left out, absent tensors not told apart.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.contract.announced import watch
from weft.voxels import launch, preparation
from weft.voxels.epilogue import Epilogue
from weft.voxels.operator import turned

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


@pytest.fixture
def seen(monkeypatch):
    made = preparation.kernel_for, preparation._kernels
    recipes = (*made, launch._convolver, launch._differentiator)
    for recipe in recipes:
        recipe.cache_clear()
    monkeypatch.setattr(launch, "_AHEAD", set())
    yield watch(monkeypatch.setattr, frozenset({"N", "blocks", "panels"}))
    for recipe in recipes:
        recipe.cache_clear()


@pytest.mark.parametrize("count", [500, 20_000])
@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("channels", "groups"), [(32, 1), (4, 1), (32, 2)])
def test_a_training_step_is_compiled_at_once(count, order, strided, channels, groups, seen):
    announced, compiled = seen
    table = torch.full((27, count), -1, dtype=torch.int32)
    back = torch.full((27, count), -1, dtype=torch.int32) if strided else None
    rows = None if order is None else torch.arange(count).int()
    x = torch.zeros(count, channels).half().requires_grad_()
    weight = torch.zeros(27, channels // groups, channels).half().requires_grad_()
    bias, g = torch.zeros(channels).half(), torch.zeros(count, channels).half()
    options = {"groups": groups, "precision": "ieee"}
    once = turned(weight.detach(), groups)
    launch.compile_ahead(x, weight, lambda: once, bias, table, back, rows, rows, **options)
    ahead = len(announced)
    launch.convolve(x, weight, table, rows, after=Epilogue(shift=bias), **options)
    launch.weight_gradient(x, g, table, rows, **options)
    read = table if back is None else back
    launch.convolve(g, once, read, rows, flip=back is None, **options)
    assert len(announced) == ahead
    assert set(map(str, announced)) == set(map(str, compiled))


@pytest.mark.parametrize("count", [500, 20_000, 300_000])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("offsets", "channels"), [(27, 4), (27, 32), (125, 32), (125, 512)])
def test_what_is_compiled_ahead_is_what_is_called(count, offsets, shuffled, channels, seen):
    announced, compiled = seen
    count = min(count, 2**22 // channels)
    table = torch.full((offsets, count), -1, dtype=torch.int32)
    order = torch.arange(count).int() if shuffled else None
    x, g = torch.zeros(2, count, channels).half()
    weight = torch.zeros(offsets, channels, channels).half()
    options = {"groups": 1, "precision": "ieee"}
    launch.convolve(x, weight, table, order, **options)
    launch.weight_gradient(x, g, table, order, **options)
    assert len(announced) >= 5
    for made in announced:
        assert made in compiled
    assert all(made in announced for made in compiled)
