"""The first call compiles at once what it is about to call, for the very dtypes that it then has.

Nothing runs on a GPU: machine code is a stub that notes its arguments.  Seen red with: a table of
int64 where int32 stood for it, an order left out, a kernel that is not announced.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from weft.core import launcher
from weft.voxels import launch

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


def signature(kernel, arguments):
    """What machine code depends on: dtypes, which tensors are None, constants."""
    kinds = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
    free = {kernel.arg_names.index(n) for n in ("N", "blocks", "panels") if n in kernel.arg_names}
    return [kernel.__name__, *("number" if i in free else k for i, k in enumerate(kinds))]


@pytest.fixture
def seen(monkeypatch):
    announced, compiled = [], []

    def machine_code(kernel, arguments, options):
        compiled.append(signature(kernel, arguments))
        return lambda programs, stream, values: None

    def in_threads(calls):
        for kernel, tensors, free in calls:
            arguments = (*tensors, *free, *kernel._arguments)
            announced.append(signature(kernel._kernel, arguments))

    monkeypatch.setattr(launcher, "machine_code", machine_code)
    monkeypatch.setattr(launcher, "_compile_in_threads", in_threads)
    monkeypatch.setattr(launcher, "_current_stream", lambda: 0)
    monkeypatch.setattr(launcher, "_made", set())
    recipes = (launch._kernel, launch._preparation, launch._convolver, launch._differentiator)
    for recipe in recipes:
        recipe.cache_clear()
    yield announced, compiled
    for recipe in recipes:
        recipe.cache_clear()


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
    alone = [made[0] for made in compiled if made not in announced]
    assert alone == ["mask_kernel"]
