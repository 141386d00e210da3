"""The launch that writes all arguments of a padded record gives the bits of torch's copies.

Seen red with: padding that repeats the last rows or other lines, row numbers of one line for all,
the words of a float64 exchanged, memory of a lazy conjugate or of a transposed tensor.
"""

import pytest
import torch

from tests.nearness import same
from tests.recorders import captured
from torchweft.capturing import buffers, launch
from torchweft.capturing.buffers import Buffers
from torchweft.capturing.layout import Layout
from torchweft.core.backend import interpreted
from torchweft.core.explain import explain
from torchweft.testing.contract import assert_same_bits
from torchweft.testing.sanitizer import reaching

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not interpreted(), reason="in the interpreter kernels serve the CPU too"),
]

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
)
LENGTHS = [(7, 11), (7, 11), (0, 0), (1, 1), (2, 12), (9, 3), (0, 11), (9, 12)]
"""Rows of x and edges; some repeat many times, some leave no more padding than there must be."""

LEAVES = {
    "x": (7, 3),
    "edges": (11,),
    "lines": (2, 11),
    "blocks": (3, 7, 5),
    "pairs": (7, 2, 3),
    "still": (2, 4),
    "number": (),
    "nothing": (7, 0),
    "without lines": (0, 7),
    "both": (7, 11),
}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """In the interpreter the kernel serves CPU tensors, whose addresses it is given."""
    monkeypatch.setattr(buffers, "kernels_serve", lambda device: True)
    plain, init = launch._plain, launch.Writer.__init__
    with reaching() as tensors:

        def reached(source, word):
            tensors.append(plain(source, word))
            return tensors[-1]

        def made(self, layout, written, rooms):
            tensors.extend(written.values())
            init(self, layout, written, rooms)

        monkeypatch.setattr(launch, "_plain", reached)
        monkeypatch.setattr(launch.Writer, "__init__", made)
        yield


def drawn(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def given(lengths, dtype, seed=0):
    """Leaves in which 7 and 11 are other lengths."""
    now = dict(zip((7, 11), lengths, strict=True))
    shapes = [[now.get(n, n) for n in shape] for shape in LEAVES.values()]
    return [drawn(shape, dtype, seed + i) for i, shape in enumerate(shapes)]


def by_torch(layout, leaves, rooms):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "kernels_serve", lambda device: False)
        return Buffers(layout, leaves, rooms)


def assert_as_torch(layout, *calls):
    """Buffers written by the launch and by torch, call after call, into memory of before."""
    rooms = layout.rooms(layout.lengths(calls[0]), (0,) * len(layout.sizes))
    own, exact = Buffers(layout, calls[0], rooms), by_torch(layout, calls[0], rooms)
    assert own._writer is not None
    assert exact._writer is None
    for leaves in calls:
        lengths = layout.lengths(leaves)
        versions = [t._version for t in own.leaves]
        own.write(leaves, lengths)
        exact._filled = None  # or padding stays where lengths do
        exact.write(leaves, lengths)
        for name, a, b, before in zip(
            layout.names, own.leaves, exact.leaves, versions, strict=True
        ):
            assert_same_bits(a.detach(), b.detach(), f"{name}, {lengths}")
            assert a._version > before
    return own


def copied(own):
    """The leaves that torch copies."""
    return [i for buffers in own._copied.values() for i in buffers]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fills", [{}, dict.fromkeys(("edges", "lines"), 1), {"edges": -2.5}])
def test_values_and_padding(fills, dtype):
    """Repeated rows, and constants in the leaves that have edges."""
    if dtype in (torch.uint8, torch.bool):
        fills = {name: abs(fill) for name, fill in fills.items()}
    others = dict.fromkeys(("blocks", "pairs") if fills else (), 3)
    sizes = {"x": (1.4, others), "edges": (1.3, fills)}
    layout = Layout([*LEAVES], given((7, 11), dtype), sizes)
    calls = [given(lengths, dtype, seed) for seed, lengths in enumerate(LENGTHS)]
    own = assert_as_torch(layout, *calls)
    too_wide = {*fills, *others} if dtype == torch.complex128 else set()
    assert {layout.names[i] for i in copied(own)} == {"both", *too_wide}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_row_numbers(dtype):
    """Of several tables, lines and words of a row."""
    fills = dict.fromkeys(("edges", "lines"), "x")
    sizes = {"x": (1.4, {"blocks": "edges", "pairs": "x"}), "edges": (1.3, fills)}
    layout = Layout([*LEAVES], given((7, 11), dtype), sizes)
    calls = [given(lengths, dtype, seed) for seed, lengths in enumerate(LENGTHS)]
    own = assert_as_torch(layout, *calls)
    assert len(copied(own)) == (5 if dtype == torch.int16 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_lines_of_several_blocks(dtype):
    block = launch.TILE.blocks[0]
    rooms = [(2, block // 3 + 1), (2, 2 * block), (2, 5)]
    leaves = [[drawn((2, n, 3), dtype, n), drawn((n,), dtype, n)] for _, n in rooms]
    layout = Layout(["x", "y"], leaves[1], {("x", 1): (1.1, {"y": 7})})
    assert_as_torch(layout, leaves[1], *leaves)


def test_memory_that_holds_no_plain_values():
    """Transposed, expanded, at an odd address, conjugated or negated lazily."""
    wide = drawn((5, 4), torch.complex64, 0)
    odd = drawn((21,), torch.float16, 1)[1:].view(5, 4)
    leaves = [wide, wide.conj(), wide.conj().imag, torch._neg_view(wide.real.contiguous())]
    leaves += [wide.T.contiguous().T, wide[:, :1].expand(5, 4), odd]
    layout = Layout(list("abcdefg"), leaves, {"a": 1.5})
    assert_as_torch(layout, leaves, leaves)


def test_a_large_buffer_is_torchs(monkeypatch):
    leaves = [drawn((5, 4), torch.float32, 0), drawn((5,), torch.float32, 1)]
    layout = Layout(["x", "y"], leaves, {"x": 1.5})
    monkeypatch.setattr(launch, "MOST_BYTES", 100)
    own = assert_as_torch(layout, leaves)
    assert copied(own) == [0]


def test_a_captured_function_needs_one_launch_a_call():
    """Also for arguments with gradients, and under inference mode."""
    x, scale = drawn((9, 3), torch.float64, 0).requires_grad_(), drawn((2,), torch.float64, 1)

    def function(x, scale, label):
        return x * scale[0], x.square().sum(0)

    run, _ = captured(function, x, scale, "a", sizes={"x": (1.5, {"x": 0})})
    for call, count in enumerate((9, 9, 9, 4, 12, 0)):
        values = drawn((count, 3), torch.float64, count).requires_grad_()
        found = []
        seen = explain(lambda given=values, to=found: to.extend(run(given, scale, "a")))
        assert len(seen.launches) == (call > 0)  # the first call has no buffers
        for a, b in zip(found, function(values, scale, "a"), strict=True):
            same(a, b.detach())
    with torch.inference_mode():
        for _ in range(3):
            same(run(x.detach(), scale, "a")[0], x.detach() * scale[0])
