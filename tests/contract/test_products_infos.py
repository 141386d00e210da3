"""Infos as values: another library's, saved and loaded, pinned and moved.

Seen red with: infos taken by their class alone, no class allowed to `torch.load`, fields left out
of what is pinned, marks of constant tables lost on the way.
"""

import io
from typing import NamedTuple

import pytest
import torch

from torchweft import o3, products
from torchweft.core.table_copies import is_constant

X = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]])
INFO, BACK1, BACK2 = products.sparse_product_infos(
    [2, 0, 1], [1, 0, 2], [1, 1, 0], [2.0, -1.0, 3.0], in1_size=3, in2_size=3
)
SCALE, SCALE_BACK = products.sparse_scale_infos([2, 0, 1], [1, 1, 0], [2.0, -1.0, 3.0], in_size=3)


class ProductTuple(NamedTuple):
    """The fields of Equitorch's SparseProductInfo."""

    scale: torch.Tensor | None = None
    index1: torch.Tensor | None = None
    index2: torch.Tensor | None = None
    seg_out: torch.Tensor | None = None
    gather_index: torch.Tensor | None = None
    index_out: torch.Tensor | None = None
    out_size: int | None = None


class ScaleTuple(NamedTuple):
    """The fields of Equitorch's SparseScaleInfo."""

    scale: torch.Tensor | None = None
    index: torch.Tensor | None = None
    seg_out: torch.Tensor | None = None
    index_out: torch.Tensor | None = None
    out_size: int | None = None


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_named_tuples_of_other_libraries(compiled):
    maybe = torch.compile(fullgraph=True, backend="eager") if compiled else lambda f: f
    theirs = [ProductTuple(*info) for info in (INFO, BACK1, BACK2)]
    found = maybe(lambda x: products.sparse_mul(x, x, *theirs))(X)
    same(found, products.sparse_mul(X, X, INFO, BACK1, BACK2))
    theirs = [ScaleTuple(*info) for info in (SCALE, SCALE_BACK)]
    found = maybe(lambda x: products.sparse_scale(x, *theirs))(X)
    same(found, products.sparse_scale(X, SCALE, SCALE_BACK))


def test_other_tuples_are_refused():
    told = r"info_bwd1 is a SparseScaleInfo: .* \(scale, index1, .*\)\. Build one"
    with pytest.raises(TypeError, match=told):
        products.sparse_mul(X, X, INFO, SCALE)
    with pytest.raises(TypeError, match="info_bwd is a ProductTuple: it must be a SparseScaleInfo"):
        products.sparse_scale(X, SCALE, ProductTuple(*INFO))


@pytest.mark.parametrize("info", [INFO, SCALE, o3.irreps_info("2x0e+1o")], ids=type)
def test_saved_infos_are_loaded_by_default(info):
    file = io.BytesIO()
    torch.save({"info": info}, file)
    file.seek(0)
    loaded = torch.load(file)["info"]
    assert type(loaded) is type(info)
    for found, expected in zip(loaded, info, strict=True):
        if isinstance(expected, torch.Tensor):
            same(found, expected)
        else:
            assert found == expected


def test_pinned_and_moved_without_waiting(monkeypatch):
    """Pages are locked with an accelerator alone: the calls are what is seen here."""
    calls = []
    move = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: calls.append("pin") or t.clone())
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *a: calls.append(a[2]) or move(t, *a))
    pinned = INFO.pin_memory()
    assert calls == ["pin"] * 4  # the scale, two indices and the segments
    same(pinned.scale, INFO.scale)
    assert all(is_constant(t) for t in pinned if isinstance(t, torch.Tensor))
    moved = pinned.to("cpu", torch.float32, non_blocking=True)
    assert calls[4:] == [True] * 4
    assert (moved.scale.dtype, moved.index1.dtype) == (torch.float32, torch.int64)
    assert moved.out_size == INFO.out_size
