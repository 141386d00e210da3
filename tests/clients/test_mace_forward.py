"""The forward pass of converted MACE models beside that of their class: results, calls, operations.

Errors are measured by those of the class's own float32 results, scaled to the precision.
Seen red with: forces of the other sign, strained edges without their shifts, the first head for all
nodes, the repulsion left out, rows of nodes as ir_mul.
"""

import copy
import functools
import io

import pytest
import torch

pytest.importorskip("mace")

from tests.clients.agreement import assert_agree, begun, counted
from tests.clients.maces import as_batch, mace, rattled
from tests.clients.test_mace import DOUBLE, REPULSION, RESIDUAL, batch, original
from torchweft import o3
from torchweft.o3.adapters.mace_forward import MaceForward, MaceInteraction

VARIANTS = {
    "MACE": {"kind": "MACE", **REPULSION},
    "residual": {"first": RESIDUAL, "use_last_readout_only": True},
    "repulsion": {"hidden_irreps": "8x0e", **REPULSION},
    "heads": {"heads": ["a", "b"], "atomic_inter_shift": [0.2, 0.7]},
    "MACE of heads": {"kind": "MACE", "heads": ["a", "b"]},
}
OPTIONS = {
    "forces": {},
    "training": {"training": True},
    "energies": {"compute_force": False},
    "stress": {"compute_stress": True},
    "virials in training": {"training": True, "compute_virials": True, "compute_force": False},
    "displacement": {"compute_displacement": True},
}


@functools.cache
def converted(variant, dtype=DOUBLE):
    return o3.from_mace(original(dtype, **VARIANTS[variant]))


def given(variant, dtype=DOUBLE, graphs=2):
    """The crystal and the molecule, or the crystal alone."""
    settings = VARIANTS[variant]
    found = batch(dtype, len(settings.get("heads", "a")))
    if "pair_repulsion" in settings:  # it reaches as far as bonds: pressed together
        for name in ("positions", "shifts", "cell"):
            found[name] = 0.7 * found[name]
    if graphs == 2:
        return found
    atoms, edges = int(found["ptr"][1]), found["edge_index"][0] < found["ptr"][1]
    alone = {name: found[name][:atoms] for name in ("positions", "node_attrs", "batch")}
    alone |= {name: found[name][edges] for name in ("shifts", "unit_shifts")}
    alone |= {"edge_index": found["edge_index"][:, edges], "cell": found["cell"][:3]}
    return alone | {"ptr": found["ptr"][:2], "head": found["head"][:1]}


def by_class(model, data, **options):
    return type(model).forward(model, data, **options)


def tensors(found):
    return {name: t.detach() for name, t in found.items() if t is not None}


def mul_ir(model, found):
    """The class's own results, with rows of nodes as its hook gives them."""
    rows = model.forward._irreps
    joined = o3.adapters.mace_forward.rows_of_e3nn(
        [found["node_feats"]], [o3.Irreps([item for irreps in rows for item in irreps])]
    )
    return found | {"node_feats": joined}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("graphs", [1, 2])
def test_results_are_those_of_the_class(variant, graphs):
    for name, options in OPTIONS.items():
        results = {}
        for dtype in (DOUBLE, torch.float32):
            model = converted(variant, dtype)
            assert type(model.forward) is MaceForward
            theirs = mul_ir(model, by_class(model, given(variant, dtype, graphs), **options))
            ours = model(given(variant, dtype, graphs), **options)
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert (ours[key] is None) == (value is None), (name, key)
                if value is not None:
                    assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype), key
            results[dtype] = tensors(theirs), tensors(ours)
        exact, found = results[DOUBLE]
        rounded, narrow = results[torch.float32]
        assert_agree(found, exact, rounded)
        assert_agree(narrow, exact, rounded, torch.float32)


def test_positions_of_nan_give_nan_in_their_structure_alone():
    """Nothing hides them, neither a cutoff nor a sum."""
    model, data = converted("residual"), given("residual")
    exact = tensors(model(dict(data), compute_stress=True))
    data["positions"] = data["positions"].detach().clone()
    data["positions"][3, 1] = float("nan")
    found = tensors(model(data, compute_stress=True))
    atoms = int(data["ptr"][1])
    assert found["energy"].isnan().tolist() == [True, False]
    assert found["forces"][:atoms].isnan().any(1).all()
    for name, rows in (("energy", 1), ("forces", atoms)):
        assert (found[name][rows:] == exact[name][rows:]).all(), name


def test_a_cell_without_volume_has_the_stress_of_the_class():
    data = given("residual", graphs=1)
    data["cell"] = data["cell"].clone()
    data["cell"][2] = data["cell"][0] - data["cell"][1]
    model = converted("residual")
    ours = tensors(model(dict(data), compute_stress=True))
    theirs = tensors(by_class(model, dict(data), compute_stress=True))
    assert ours["stress"].isfinite().all()
    assert (ours["stress"] == theirs["stress"]).all()


def test_a_call_leaves_its_data():
    """But for the gradient that positions then take."""
    data = given("residual")
    before = {name: id(value) for name, value in data.items()}
    converted("residual")(data, compute_stress=True)
    assert {name: id(value) for name, value in data.items()} == before
    assert data["positions"].requires_grad


RARE = {
    "Hessian": ({"compute_hessian": True}, {}),
    "forces of edges": ({"compute_edge_forces": True}, {}),
    "stresses of atoms": ({"compute_atomic_stresses": True}, {}),
    "a displacement": ({"compute_stress": True}, {"displacement": torch.zeros(1, 3, 3).to(DOUBLE)}),
    "shifts in float32": ({}, {"shifts": torch.float32}),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_calls_go_to_the_class(name, monkeypatch):
    options, changes = RARE[name]
    model, called = converted("residual"), []
    own = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda *args, **given: called.append(1) or own(*args, **given)
    )

    def data():
        found = given("residual", graphs=1)
        for key, change in changes.items():
            tensor = isinstance(change, torch.Tensor)
            found[key] = change.clone().requires_grad_() if tensor else found[key].to(change)
        return found

    found = model(data(), **options)
    assert called
    expected = mul_ir(model, own(model, data(), **options))
    for key, value in tensors(expected).items():
        assert (found[key].detach() == value).all(), key


def test_a_class_of_the_users_keeps_its_forward():
    model = original()
    model.__class__ = type("Own", (type(model),), {})
    assert "forward" not in vars(o3.from_mace(model))


def test_hooks_of_functions_of_edges_are_called():
    """Seen red with: one kernel for both, whose results no module returns."""
    plain, called = original(), []

    def heard(module, args, output):
        called.append(type(module).__name__)

    early = plain.spherical_harmonics.register_forward_hook(heard)
    model = o3.from_mace(plain)
    model(given("residual"))
    assert called == ["SphericalHarmonics"]
    model.radial_embedding.register_forward_hook(heard)
    early.remove()
    model(given("residual"))
    assert called[1:] == ["_RadialEmbedding"]


def test_copies_have_a_forward_of_their_own():
    model = converted("residual")
    expected = model(given("residual"))["forces"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(given("residual"))["forces"].any()
        assert (model(given("residual"))["forces"] == expected).all()


@pytest.mark.parametrize(("variant", "indices"), [("residual", 0), ("heads", 2)])
def test_a_force_call_has_no_gradient_by_index(variant, indices):
    """On a GPU that is a sort and ten kernels; scales and shifts of heads have none."""
    model, data = converted(variant, torch.float32), given(variant, torch.float32)
    ours = counted(lambda: model(dict(data)))
    theirs = counted(lambda: by_class(model, dict(data)))
    assert (ours["index"], ours["index_put"]) == (indices, 0)
    assert theirs["index_put"] >= 3
    assert ours.total() <= theirs.total() - 20


def test_a_force_call_begins_two_fifths_of_the_operations():
    """Of 8 atoms: harmonics and radial functions, and their gradients, are one loop each."""
    plain, data = (
        mace(torch.float32, max_ell=3, correlation=3),
        as_batch(rattled(), dtype=torch.float32),
    )
    theirs = begun(lambda: plain(dict(data))).total()
    model = o3.from_mace(plain)
    assert begun(lambda: model(dict(data))).total() <= 0.4 * theirs


@pytest.mark.parametrize("variant", ["MACE of heads", "residual", "repulsion"])
def test_energies_of_graphs_have_no_sum_of_any_order(variant):
    """On a GPU those are atomic; nodes of a graph may stand anywhere."""
    model, data = converted(variant, torch.float32), given(variant, torch.float32)
    ours = counted(lambda: model(dict(data), compute_force=False))
    assert not [name for name in ours if name.startswith(("index_add", "scatter"))]
    shuffled = dict(data) | _shuffled(data)
    exact = tensors(converted(variant)(given(variant), compute_force=False))
    rounded = tensors(by_class(model, dict(data), compute_force=False))
    found = tensors(model(shuffled, compute_force=False))
    names = ["energy"]
    exact, rounded, found = ({n: of[n] for n in names} for of in (exact, rounded, found))
    assert_agree(found, exact, rounded, torch.float32)


def _shuffled(data):
    """The same structures with their nodes in another order."""
    count = len(data["batch"])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    place = order.argsort()
    rows = {n: data[n].detach()[order] for n in ("positions", "node_attrs", "batch")}
    return rows | {"edge_index": place[data["edge_index"]]}


def test_a_mean_of_neighbours_that_is_changed_later():
    """The division is in the radial network, which is made with the first value."""

    def changed(model):
        for block in model.interactions:
            block.avg_num_neighbors = 7.0
        return model

    late, early = changed(o3.from_mace(original())), o3.from_mace(changed(original()))
    narrow = changed(o3.from_mace(original(torch.float32)))
    assert {type(block.forward) for block in late.interactions} == {MaceInteraction}
    found, exact = (tensors(model(given("residual"))) for model in (late, early))
    assert_agree(found, exact, tensors(narrow(given("residual", torch.float32))))
