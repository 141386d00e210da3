"""`torchweft.capture` without a GPU: signatures, sizes and padding, effects, errors.

Replays are those of tests/recorders.py; tests/integration/test_capture_gpu.py has graphs of CUDA.
"""

import contextlib
import copy
import inspect
import itertools
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import torchweft
from tests.nearness import same
from tests.recorders import captured
from torchweft import o3
from torchweft.capturing import functions, graphs
from torchweft.capturing.comparison import Written
from torchweft.capturing.gradients import Gradients, leaves_of
from torchweft.capturing.layout import SPARE, Layout
from torchweft.core import private
from torchweft.testing import assert_as_accurate

SIZES = {"positions": 1.1, "shift": (1.1, {"src": "positions", "dst": "positions"})}
CELL = 4.0


X, E = torch.ones(5, 3), torch.zeros(8, dtype=torch.int64)


class Potential(nn.Module):
    """Two layers of messages over directions and 1 / r, with an energy for each atom."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(3, 4)
        instructions = [(0, degree, degree, "uvu", True) for degree in range(2)]
        self.first = o3.TensorProductConv("4x0e", "0e+1o", "4x0e+4x1o", instructions)
        back = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True)]
        self.second = o3.TensorProductConv("4x0e+4x1o", "0e+1o", "4x0e", back)
        widths = self.first.weight_numel, self.second.weight_numel
        self.radial = nn.ModuleList(nn.Linear(2, width) for width in widths)
        self.out = nn.Linear(4, 1)

    def forward(self, positions, species, src, dst, shift):
        across = positions[dst] - positions[src] + CELL * shift
        length = across.norm(dim=1, keepdim=True)
        y = torch.cat([torch.ones_like(length), across / length], 1)
        radial = torch.cat([1 / length, (-length).exp()], 1)
        x = self.embedding(species)
        for conv, network in zip((self.first, self.second), self.radial, strict=True):
            x = conv(x, y, network(radial), src, dst, len(positions))
        return self.out(x.tanh()).squeeze(1)


def forces_of(model):
    def forces(positions, species, src, dst, shift):
        positions = positions.detach().requires_grad_()
        energies = model(positions, species, src, dst, shift)
        (gradient,) = torch.autograd.grad(energies.sum(), positions)
        return {"energies": energies, "forces": -gradient}

    return forces


def atoms(count, edges, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    positions = CELL * torch.rand(count, 3, generator=generator, dtype=torch.float64)
    src, dst = torch.randint(0, count, (2, edges), generator=generator)
    shift = torch.randint(-1, 2, (edges, 3), generator=generator)
    shift[src == dst] = torch.tensor([1, 0, 0])
    species = torch.randint(0, 3, (count,), generator=generator)
    return positions.to(dtype), species, src, dst, shift.to(dtype)


def errors(model, *calls):
    """Of results in float32, and the exact ones, both flat: (results − exact, exact)."""
    found, exact = [], []
    for results, given in calls:
        wide = [t.double() if t.is_floating_point() else t for t in given]
        found += [t.flatten() for t in results.values()]
        exact += [t.flatten() for t in forces_of(model.double())(*wide).values()]
        model.float()
    exact = torch.cat(exact)
    return (torch.cat(found).double() - exact).detach(), exact.detach()


def agree(found, model, arguments):
    """At most twice the error of calls of the model, which has more of it for more edges."""
    calls = [(forces_of(model)(*a), a) for a in [arguments, *(atoms(20, 90, n) for n in range(4))]]
    noise, _ = errors(model, *calls)
    off, exact = errors(model, (found, arguments))
    assert_as_accurate((off + exact).float(), exact, noise)


def test_on_the_cpu_the_function_is_returned():
    def function(x):
        return x

    assert torchweft.capture(function, torch.ones(2)) is function
    assert torchweft.capture(function, torch.ones(2), sizes={"x": 1.1}) is function


def test_values_change_and_results_stay():
    def function(x, factor):
        return {"sum": x.sum(0) * factor, "shape": tuple(x.shape), "same": x}

    run, recorder = captured(function, torch.ones(3, 2), 2)
    given = [torch.full((3, 2), float(n)) for n in range(6)]
    found = [run(x, 2) for x in given]
    for x, result in zip(given, found, strict=True):
        same(result, function(x, 2))
    assert (recorder.rehearsals, recorder.records, recorder.replays) == (1, 1, 4)


def test_each_signature_has_a_record_of_its_own():
    run, recorder = captured(lambda x, factor: x * factor, torch.ones(3), 2)
    leaf = torch.ones(3, requires_grad=True)
    signatures = [
        (torch.ones(3), 2),
        (torch.ones(3), 2.0),
        (torch.ones(3), True),
        (torch.ones(3, dtype=torch.float64), 2),
        (torch.ones(4), 2),
        (torch.ones(3, 1), 2),
        (leaf, 2),
        (torch.ones(3), float("inf")),
    ]
    for _ in range(4):
        for x, factor in signatures:
            found = run(x, factor)
            same(found, (x * factor).detach())
            assert not found.requires_grad
    assert recorder.records == len(signatures)
    with torch.no_grad():
        run(*signatures[0])
        run(*signatures[0])
        run(*signatures[0])
    assert recorder.records == len(signatures) + 1


def test_records_are_kept_for_the_last_signatures(monkeypatch):
    monkeypatch.setattr(functions, "MOST_RECORDS", 2)
    run, recorder = captured(lambda x, n: x * n, torch.ones(3), 0)
    run(torch.ones(3), 0)
    run(torch.ones(3), 1)
    with pytest.warns(UserWarning, match=r"more than 2 signatures.*as tensors"):
        run(torch.ones(3), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.ones(3), 3)  # said once
        for _ in range(3):
            same(run(torch.ones(3), 2), torch.full((3,), 2.0))
    assert recorder.records == 1


def test_arguments_of_a_dtype_are_copied_together(monkeypatch):
    """Seen red with: one copy for each argument; a single one by the kernel for many."""
    copies, copy = [], private.foreach_copy
    monkeypatch.setattr(
        private, "foreach_copy", lambda to, of: copies.append(len(of)) or copy(to, of)
    )
    run, _ = captured(lambda *given: [2 * t for t in given], *(X, E, X[0], 3 * X))
    for seed in range(4):
        given = [torch.full_like(t, seed) for t in (X, E, X[0], 3 * X)]
        assert all((a == 2 * b).all() for a, b in zip(run(*given), given, strict=True))
    assert copies == [3] * 3  # the first call has no buffers


def test_a_function_with_a_record_in_another_record():
    inner, recorder = captured(lambda x: x + 1, torch.ones(2))
    outer, _ = captured(lambda x: 2 * inner(x), torch.ones(2))
    for n in range(4):
        same(outer(torch.full((2,), float(n))), torch.full((2,), 2.0 * n + 2))
    assert recorder.rehearsals == 0


@pytest.mark.parametrize("padded", [False, True])
def test_forces_of_atoms_whose_numbers_vary(padded):
    model = Potential()
    run, recorder = captured(forces_of(model), *atoms(20, 90), sizes=SIZES if padded else None)
    for n, e in [(20, 90), (20, 90), (19, 80), (18, 93), (20, 91)] if padded else 5 * [(20, 90)]:
        for seed in range(2):
            given = atoms(n, e, seed)
            agree(run(*given), model, given)
    assert (recorder.rehearsals, recorder.records) == (1, 1)


@pytest.mark.parametrize(("count", "edges"), [(1, 4), (2, 1), (5, 0), (7, 7)])
def test_few_atoms_and_edges(count, edges):
    """Without edges there is no row to repeat, with one atom padding is at its place."""
    model = Potential()
    run, recorder = captured(forces_of(model), *atoms(10, 40), sizes=SIZES)
    for seed in range(5):
        given = atoms(count, edges, seed)
        agree(run(*given), model, given)
    assert recorder.replays == 3


def test_more_than_there_is_room_for():
    model = Potential()
    run, recorder = captured(forces_of(model), *atoms(20, 90), sizes=SIZES)
    for seed in range(3):
        run(*atoms(20, 90, seed))
    given = atoms(21, 120)
    message = r"21 rows of positions, 120 rows of shift do not fit the room for 24 rows of .*134"
    with pytest.warns(UserWarning, match=message) as told:
        agree(run(*given), model, given)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n, e in [(21, 120), (20, 90), (22, 132)]:
            given = atoms(n, e, n)
            agree(run(*given), model, given)
    assert (recorder.rehearsals, recorder.records) == (2, 2)


def test_an_argument_with_both_ends_and_one_with_pairs():
    """(2, E) tables by the number of a dimension; (N, N) varies in both."""

    def function(x, ends, near):
        sums = torch.zeros_like(x).index_add_(0, ends[1], x[ends[0]])
        return sums, near @ x

    def given(n, e, seed=0):
        generator = torch.Generator().manual_seed(seed)
        near = torch.rand(n, n, generator=generator, dtype=torch.float64)
        return (
            torch.rand(n, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, n, (2, e), generator=generator),
            near,
        )

    sizes = {"x": (1.2, {"near": 0}), ("ends", 1): (1.2, {"ends": "x"})}
    run, _ = captured(function, *given(7, 20), sizes=sizes)
    for n, e in [(7, 20), (5, 10), (6, 22), (7, 3), (4, 4)]:
        for found, exact in zip(run(*given(n, e)), function(*given(n, e)), strict=True):
            same(found, exact)


def test_padding_names_padding_rows_alone():
    """Ends differ, are in the room, and every padded row has about as many."""
    x, src, pair = torch.ones(9, 2), torch.zeros(40, dtype=torch.int64), torch.zeros(2, 40).int()
    sizes = {"x": 1.5, "src": (1.5, {"src": "x", "pair": "x"})}
    layout = Layout(["x", "src", "pair"], [x, src, pair], sizes)
    rooms = layout.rooms((9, 40), (0, 0))
    assert rooms == (16, 62)
    buffers = [torch.zeros(62).long(), torch.zeros(2, 62).int()]
    for leaf, buffer in enumerate(buffers, 1):
        layout.fill(leaf, buffer, (9, 40), rooms)
    tables = [buffers[0], *buffers[1]]
    for table in tables:
        assert not table[:40].any()
        counts = torch.bincount(table[40:], minlength=16)
        assert counts[:9].sum() == 0
        assert int(counts[9:].max() - counts[9:].min()) <= 1
    for a, b in itertools.pairwise(tables[1:]):
        assert (a[40:] != b[40:]).all()
    assert (tables[0][40:] != tables[2][40:]).all()
    assert rooms[0] - 9 >= SPARE


def batch(count, owners, seed=0):
    """Molecules of atoms with a target each, and their weights in the loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    owner = torch.randint(0, owners, (count,), generator=generator)
    return {
        "x": x,
        "owner": owner,
        "target": torch.rand(owners, generator=generator, dtype=torch.float64),
        "weight": torch.full((owners,), 1 / owners, dtype=torch.float64),
    }


BATCH_SIZES = {"x": (1.2, {"owner": "target"}), "target": (1.0, {"weight": 0})}


def trainer(optimizer_of, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device)
    optimizer = optimizer_of(model.parameters())

    def step(batch):
        optimizer.zero_grad()
        energies = torch.zeros_like(batch["target"])
        energies = energies.index_add(0, batch["owner"], model(batch["x"]).squeeze(1))
        loss = (batch["weight"] * (energies - batch["target"]).square()).sum()
        loss.backward()
        optimizer.step()
        return loss

    return model, step


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "each": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("optimizer_of", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_training_step(optimizer_of, padded):
    """Each call is one step; seen red with: the comparison of padding as one step more."""
    model, step = trainer(optimizer_of)
    exact, plain = trainer(optimizer_of)
    run, recorder = captured(step, batch(12, 4), sizes=BATCH_SIZES if padded else None)
    for seed in range(8):
        given = batch(12 - seed % 3, 4 + seed % 2, seed) if padded else batch(12, 4, seed)
        before = [p.clone() for p in exact.parameters()]
        loss, expected = run(given), plain(given).detach()
        if not padded:
            same(loss, expected)
        moved = [b - a for a, b in zip(before, exact.parameters(), strict=True)]
        for a, b, step_of in zip(model.parameters(), exact.parameters(), moved, strict=True):
            off = (a - b).abs().max()
            room = step_of.abs().max() * torch.finfo(b.dtype).eps ** 0.5 if padded else 0
            assert off <= room
    assert recorder.records == 1


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_for_a_step_outside(padded, detached):
    """Seen red with: the gradients of a call with padding, added to those of the call."""

    def slope_of(weight):
        def slope(x, share):
            loss = (share * (x * weight).square().sum(1)).sum()
            loss.backward()
            return loss.detach() if detached else loss

        return slope

    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    sizes = {"x": (1.2, {"share": 0})} if padded else None
    run, _ = captured(slope_of(first), X, torch.ones(5), sizes=sizes)
    for seed in range(7):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).round()
        same(run(x, torch.ones(5)), slope_of(second)(x, torch.ones(5)).detach())
        same(first.grad, second.grad)
        if seed % 2 == 0:  # so the rehearsal begins without gradients
            first.grad = second.grad = None


def test_a_training_step_on_forces():
    """Weights see padded edges too; seen red with: padded edges of length 0, which are NaN."""
    wanted = atoms(20, 90, 5)[0]

    def trained():
        model = Potential()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(positions, species, src, dst, shift, weight):
            optimizer.zero_grad()
            positions = positions.detach().requires_grad_()
            energies = model(positions, species, src, dst, shift)
            (slope,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
            loss = (weight[:, None] * (slope - wanted[0]).square()).sum()
            loss.backward()
            optimizer.step()
            return loss

        return model, step

    (model, step), (exact, plain) = trained(), trained()
    sizes = SIZES | {"positions": (1.1, {"weight": 0})}
    run, recorder = captured(step, *atoms(20, 90), torch.ones(20), sizes=sizes)
    for seed in range(5):
        n = 20 - seed % 2
        given = *atoms(n, 90, seed), torch.ones(n) / n
        found, expected = run(*given), plain(*given).detach()
        assert (found - expected).abs() <= expected * torch.finfo(found.dtype).eps ** 0.5
    assert recorder.replays == 3
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        assert (a - b).abs().max() <= b.abs().max() * torch.finfo(b.dtype).eps ** 0.5


def test_what_is_written_is_undone():
    state, view, untouched = torch.zeros(3), torch.ones(2, 2), torch.ones(1)
    with Written() as written:
        state.add_(1)
        state.add_(1)
        view[0].mul_(3)
        made = torch.zeros(2)
        made.add_(untouched)
        torch._foreach_add_([state], 1)
    assert len(written._before) == 2
    with written.undone():
        same(state, torch.zeros(3))
        same(view, torch.ones(2, 2))
        state.fill_(7)
    same(state, torch.full((3,), 3.0))
    same(view, torch.tensor([[3.0, 3.0], [1.0, 1.0]]))


def test_a_group_of_channels_is_no_group_of_ranks():
    """Torch's group norm has an argument of that name; seen red with: names alone."""
    with Written() as written:
        nn.functional.group_norm(torch.rand(3, 4), 2)
    assert not written.groups


IN_RESULTS = {
    "a sum": lambda x, weight: x.sum(),
    "a mean": lambda x, weight: (weight[:, None] * x).sum() / len(x),
    "a mean of results of a row each": lambda x, weight: x - x.mean(0),
    "a count": lambda x, weight: torch.full((), len(x)),
}


@pytest.mark.parametrize("function", IN_RESULTS.values(), ids=IN_RESULTS)
def test_padding_in_a_result(function):
    """Seen red with: results that are cut, and not compared."""
    x, weight = torch.rand(10, 2), torch.ones(10)
    run, _ = captured(function, x, weight, sizes={"x": (1.1, {"weight": 0})})
    run(x, weight)
    message = r"result 0 differs with padding.*13 rows of x"
    with pytest.raises(torchweft.CaptureError, match=message):
        run(x, weight)


RANDOM = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "a mask of its channels": lambda x: nn.functional.feature_alpha_dropout(x[None], 0.5, True)[0],
    "dropped irreps": o3.Dropout("2x0e", 0.5),
    "uniform noise": lambda x: x + torch.rand_like(x) + torch.rand(x.shape, requires_grad=True),
    "normal noise": lambda x: x + torch.randn_like(x) * torch.randn(len(x), 2, generator=None),
    "dropped rows": lambda x: x * x.new_empty(len(x), 1).bernoulli_(0.5),
}


@pytest.mark.parametrize("function", RANDOM.values(), ids=RANDOM)
def test_random_numbers(function):
    """Calls draw them, also where padding is compared; seen red with: a comparison that draws."""
    x = torch.rand(10, 2, dtype=torch.float64)
    weight = torch.ones(10, dtype=torch.float64)

    def energy(x, weight):
        return (weight[:, None] * function(x)).sum()

    run, recorder = captured(energy, x, weight, sizes={"x": (1.1, {"weight": 0})})
    for seed in range(2):
        torch.manual_seed(seed)
        found, after = run(x, weight), torch.get_rng_state()
        torch.manual_seed(seed)
        same(found, energy(x, weight))
        assert after.tolist() == torch.get_rng_state().tolist()
    assert run(x, weight) != run(x, weight)
    assert recorder.records == 1


def test_a_training_step_with_dropout():
    """Each of the calls that make a record is one step.

    Seen red with: a step, or gradients, of the comparison, of a loss that was detached.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    plain = copy.deepcopy(model)
    x = torch.rand(10, 2, dtype=torch.float64)
    weight = torch.ones(10, dtype=torch.float64)

    def step_of(model):
        adam = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x, weight):
            adam.zero_grad()
            loss = (weight * model(x)[:, 0].square()).sum()
            loss.backward()
            adam.step()
            return loss.detach()

        return step

    run, _ = captured(step_of(model), x, weight, sizes={"x": (1.1, {"weight": 0})})
    step = step_of(plain)
    for seed in range(2):
        for call in (run, step):
            torch.manual_seed(seed)
            call(x, weight)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            same(a.detach(), b.detach())
            same(a.grad, b.grad)


def test_padding_beside_random_numbers():
    """Seen red with: no comparison of functions that draw."""
    run, _ = captured(lambda x: nn.functional.dropout(x).sum(), X, sizes={"x": 1.1})
    run(X)
    with pytest.raises(torchweft.CaptureError, match="result 0 differs with padding"):
        run(X)


def test_other_random_numbers():
    def function(x, weight):
        return (weight[:, None] * x.new_empty(x.shape).exponential_()).sum()

    run, _ = captured(function, X, X[:, 0], sizes={"x": (1.1, {"weight": 0})})
    run(X, X[:, 0])
    with pytest.raises(torchweft.CaptureError, match="Draw random numbers by dropout, rand,"):
        run(X, X[:, 0])


def test_large_integers_hide_no_padding():
    """Seen red with: numbers of rows for what is rounded."""
    x, rows = torch.rand(10), torch.arange(10) + 2**24
    run, _ = captured(lambda x, rows: x.sum(), x, rows, sizes={"x": 1.1})
    run(x, rows)
    with pytest.raises(torchweft.CaptureError, match="result 0 differs with padding"):
        run(x, rows)


def test_results_that_are_noise_agree():
    """A sum that cancels is rounding alone, which padding changes: it moves where the sum begins.

    Seen red with: the largest number of the call, not what so many of them sum to.
    """
    x, weight = torch.rand(1000, generator=torch.Generator().manual_seed(0)), torch.ones(2000)
    x = torch.cat([x, -x.flip(0)])

    def function(x, weight):
        terms = (weight * x).roll(len(x) // 3)
        return x.new_zeros(1).index_add(0, torch.zeros_like(terms, dtype=torch.long), terms)

    run, _ = captured(function, x, weight, sizes={"x": (1.3, {"weight": 0})})
    for _ in range(3):
        assert run(x, weight).abs() < len(x) * x.abs().sum() * torch.finfo(x.dtype).eps


def test_results_that_tell_nothing():
    run, _ = captured(lambda x: None, torch.ones(3), sizes={"x": 1.1})
    run(torch.ones(3))
    with pytest.raises(torchweft.CaptureError, match=r"returns no tensor.*Return one"):
        run(torch.ones(3))


def test_a_result_whose_padding_cannot_be_cut():
    run, _ = captured(lambda x: x.flatten(), torch.ones(5, 3), sizes={"x": 1.1})
    run(torch.ones(5, 3))
    with pytest.raises(torchweft.CaptureError, match=r"dimension 0 of result 0 has 15 rows .* 24"):
        run(torch.ones(5, 3))


def test_a_fixed_dimension_that_has_the_length_of_a_room():
    """The first call tells which dimensions vary; seen red with: every dimension of that length."""
    run, _ = captured(lambda x: x[:, :1].expand(-1, 8).clone(), torch.rand(5, 3), sizes={"x": 1.1})
    for n in (5, 4, 5, 6):
        assert run(torch.rand(n, 3)).shape == (n, 8)


def test_an_argument_that_is_written():
    run, _ = captured(lambda x, y: y.add_(x), torch.ones(2), torch.ones(2))
    with pytest.raises(torchweft.CaptureError, match=r"writes to its argument y in place.*Return"):
        run(torch.ones(2), torch.ones(2))


def test_gradients_of_arguments_do_not_add_up():
    """Seen red with: a buffer that keeps its gradient."""

    def slope(x):
        x.square().sum().backward()
        return x.grad

    run, _ = captured(slope, torch.ones(2, requires_grad=True))
    for n in range(5):
        x = torch.full((2,), float(n), requires_grad=True)
        same(run(x), 2 * x.detach())
        assert x.grad is None


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_put_where_the_caller_reads_them(inside):
    """A record writes to the same memory; seen red with: `.grad` that the caller has emptied."""
    weight, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = torch.tensor([1.0, 2.0])

    def function():
        if inside:
            weight.grad = None
        loss = (weight * x).square().sum() + torch.autograd.grad(unused.sum(), unused)[0].sum()
        loss.backward()
        return loss

    leaves = leaves_of([function()])
    assert [leaf is weight for leaf in leaves] == [True]
    weight.grad = None
    gradients = Gradients([*leaves, unused])
    with gradients.noted():
        function()
    assert unused.grad is None
    memory = weight.grad

    def replay():
        gradients.put_in_place()
        if inside:
            memory.zero_()
        memory.add_(2 * x.square())

    if not inside:
        same(memory, 2 * x.square())
        memory.zero_()  # a graph is recorded without being run
    replay()
    for emptied in (True, True, False):
        if emptied:
            weight.grad = None
        replay()
        same(weight.grad, 2 * x.square() * (1 if emptied or inside else 2))
    weight.grad = torch.ones(2)  # of a call that is not captured
    replay()
    same(weight.grad, 2 * x.square() + (not inside))


@pytest.mark.parametrize("before", [None, torch.ones(2)])
def test_gradients_of_a_record_that_failed_are_those_of_before(before):
    """Seen red with: gradients in the memory of a graph that is never replayed, and zeros."""
    weight, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    weight.grad = before

    def fails():
        weight.grad = None
        (weight * unused.detach()).sum().backward()
        raise torchweft.CaptureError("not recorded")

    with pytest.raises(torchweft.CaptureError), Gradients([weight, unused]).noted():
        fails()
    assert weight.grad is before
    assert unused.grad is None


def test_a_line_that_waits_is_named():
    def waits(x):
        if x.dtype == torch.float32 and calls:
            raise RuntimeError("called a synchronizing CUDA operation")  # the line
        calls.append(x)
        return x

    calls = []
    run, _ = captured(waits, torch.ones(2))
    run(torch.ones(2))
    message = r"test_capture\.py, line \d+, .*# the line.*torch\.where instead of if"
    with pytest.raises(torchweft.CaptureError, match=message):
        run(torch.ones(2))


def test_errors_of_the_function_stay_as_they_are():
    def fails(x):
        raise ValueError("of the function")

    run, _ = captured(fails, torch.ones(2))
    with pytest.raises(ValueError, match="of the function"):
        run(torch.ones(2))


def test_devices():
    with pytest.raises(torchweft.DeviceError, match=r"y is on meta and x on cpu.*\.to\('cpu'\)"):
        torchweft.capture(lambda x, y: x, torch.ones(2), torch.ones(2, device="meta"))
    with pytest.raises(torchweft.ShapeError, match=r"no tensor among the arguments.*batch"):
        torchweft.capture(lambda: None)
    run, _ = captured(lambda x: x.to("meta"), torch.ones(2))
    with pytest.raises(torchweft.CaptureError, match=r"result 0 is on meta but.*Return tensors"):
        run(torch.ones(2))


VALUES = (None, "sum", torch.float64, torch.channels_last, inspect.Parameter.KEYWORD_ONLY, 1.5)


@pytest.mark.parametrize("value", VALUES)
def test_arguments_that_are_values(value):
    run, recorder = captured(lambda x, y: (x, y), X, value)
    for _ in range(4):
        assert run(X, value)[1] is value
    assert recorder.records == 1


@pytest.mark.parametrize("given", [nn.Linear(1, 1), object(), bytearray(2)])
def test_arguments_that_are_objects(given):
    run, _ = captured(lambda x, y: x, torch.ones(2), 0)
    with pytest.raises(torchweft.DTypeError, match=r"an argument is a .*tensors.*close over it"):
        run(torch.ones(2), given)


WRONG = [
    ({"z": 1.1}, torchweft.ShapeError, r"'z', which no argument is called: .* 'x', 'e'. Pass one"),
    ({("x", 2): 1.1}, torchweft.ShapeError, r"dimension 2 of x, which is \(5, 3\).*rows"),
    ({"x": 0.5}, torchweft.ShapeError, r"room of x is 0\.5.*1 or more.*1\.1"),
    ({"x": (1.1, {"e": 0})}, torchweft.ShapeError, r"e is \(8,\), without a dimension.*Move"),
    ({"e": (1.1, {"e": "x"})}, torchweft.ShapeError, r"'x', but the sizes are e.*Add 'x'"),
    ({"x": (1.1, {"x": "e"}), "e": 1.1}, torchweft.DTypeError, r"x is torch\.float32.*integers"),
    ({"x": 1.1, ("x", 0): 1.1}, torchweft.ShapeError, r"x and x both have 5 rows.*differ"),
]


@pytest.mark.parametrize(("sizes", "kind", "message"), WRONG)
def test_sizes_that_do_not_fit(sizes, kind, message):
    with pytest.raises(kind, match=message):
        torchweft.capture(lambda x, e: x, X, E, sizes=sizes)


def test_names_of_sizes_that_do_not_fit():
    with pytest.raises(torchweft.ShapeError, match=r"'x', which no .* among 'argument 0'. Pass"):
        captured(lambda *given: given[0], X, sizes={"x": 1.1})
    with pytest.raises(torchweft.ShapeError, match=r"'n', which is no tensor: .* among 'x', 'n'"):
        captured(lambda x, n: x, X, 3, sizes={"n": 1.1})
    with pytest.raises(torchweft.ShapeError, match="'a', which 2 arguments are called: "):
        captured(lambda x: x["a"], {"a": X, "b": {"a": E}}, sizes={"a": 1.1})


def test_calls_that_do_not_fit_the_examples():
    run, _ = captured(lambda x, y: x + y, torch.ones(5, 3), torch.ones(5, 3), sizes={"x": 1.1})
    with pytest.raises(torchweft.ShapeError, match=r"y is \(4, 3\) but x has 5 rows.*as many"):
        run(torch.ones(5, 3), torch.ones(4, 3))
    with pytest.raises(torchweft.ShapeError, match=r"y is \(5,\) but had 2 dimensions.*again"):
        run(torch.ones(5, 3), torch.ones(5))
    with pytest.raises(
        torchweft.ShapeError, match=r"(?s)the arguments are .* one structure.*again"
    ):
        run(torch.ones(5, 3), [torch.ones(5, 3)])


def test_names():
    def function(first, second, *more):
        return first

    run, _ = captured(function, {"a": X, "b": [E, E]}, X, X)
    assert run._layout.names == ("a", "b[0]", "b[1]", "second", "argument 2")
    assert run.__name__ == "function"
    module, _ = captured(nn.Linear(3, 3), X)
    assert module._layout.names == ("input",)


def test_a_module_that_is_trained_is_another_signature():
    model = nn.Dropout(0.5)
    run, recorder = captured(model, X)
    for mode in (True, False):
        model.train(mode)
        for _ in range(3):
            found = run(X)
    same(found, X)
    assert recorder.records == 2


def test_under_inference_mode():
    run, _ = captured(lambda x: 2 * x, X, sizes={"x": 1.2})
    with torch.inference_mode():
        for n in (5, 4, 5, 3):
            same(run(X[:n]), 2 * X[:n])


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (
            "CUDA error: operation would make the legacy stream depend on a capturing stream",
            r"graph is still alive.* Delete it, or keep loss\.detach",
        ),
        ("CUDA error: dependency created on uncaptured work in another stream", r"Delete it"),
        ("CUDA error: operation not permitted when stream is capturing", r"Move the line out of"),
        ("called a synchronizing CUDA operation", r"Move the line out of the function"),
    ],
)
def test_what_stopped_a_record_is_told(said, advice):
    """Torch's words are those of a GPU; seen red with: any error of a stream."""
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(said)
    assert re.search(advice, str(graphs._not_recorded(raised.value)))


def test_torch_is_usable_after_a_record_failed(monkeypatch):
    """Seen red with: a generator of torch that stays in the state of the failed capture.

    The captures are stand-ins: as torch's, they leave the state only if the capture ends well.
    """
    capturing = []

    @contextlib.contextmanager
    def graph(graph, pool=None, stream=None):
        capturing[:] = [True]
        yield
        capturing.clear()

    for name in ("CUDAGraph", "Stream", "current_stream", "graph_pool_handle", "set_stream"):
        monkeypatch.setattr(graphs.torch.cuda, name, mock.Mock())
    monkeypatch.setattr(graphs.torch.cuda, "graph", graph)

    def fails():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(torchweft.CaptureError, match=r"cannot be recorded"):
        graphs.CudaGraphs(torch.device("cpu")).record(fails)
    assert not capturing
