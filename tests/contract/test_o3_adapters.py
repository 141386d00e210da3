"""from_mace and from_nequip: models that call as these libraries do give what they gave.

The models are stand-ins with the libraries' names and calls: none of them is needed.
Seen red with: sources and targets exchanged, a graph that is kept when edge_index has changed, a
contraction that reads copies as components, weights copied, a block that is not told of the fusion.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parametrize

from tests.conftest import INTERPRETED
from tests.maces import dense
from torchweft import o3
from torchweft.core.recorded import Run
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.adapters import allegro, interactions
from torchweft.o3.adapters.model_call import Call
from torchweft.testing import assert_as_accurate, assert_within_bound

if INTERPRETED:
    pytest.skip("the CPU's own executors compute these", allow_module_level=True)

X, Y, OUT = "4x0e+4x1o", "0e+1o", "4x0e+4x1o+4x0e+4x1o+4x1e"
PATHS = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True), (1, 1, 2, "uvu", True)]
PATHS += [(1, 0, 3, "uvu", True), (1, 1, 4, "uvu", True)]


def named(package, base, name=None):
    """The class as one of another library's."""
    return type(name or base.__name__, (base,), {"__module__": f"{package}._stand_in"})


E3nnProduct = named("e3nn", o3.TensorProduct)
E3nnLinear = named("e3nn", o3.Linear)


def summed(rows, index, size):
    return rows.new_zeros(size, rows.shape[1]).index_add(0, index, rows)


def product():
    return E3nnProduct(X, Y, OUT, PATHS, internal_weights=False, shared_weights=False)


class InteractionBlock(torch.nn.Module):
    """As MACE's: a fused convolution has edge_index as a fourth argument."""

    def __init__(self):
        super().__init__()
        self.conv_tp = product()
        self.linear = E3nnLinear(OUT, X)

    def forward(self, x, y, weight, edge_index):
        if hasattr(self, "conv_fusion"):
            message = self.conv_tp(x, y, weight, edge_index)
        else:
            rows = self.conv_tp(x[edge_index[0]], y, weight)
            message = summed(rows, edge_index[1], len(x))
        return self.linear(message)


class Contraction(torch.nn.Module):
    def __init__(self, irreps, out, correlation, channels):
        super().__init__()
        self.correlation, self.count = correlation, len(irreps)
        self.weights = torch.nn.ParameterList()
        for degree in range(correlation, 0, -1):
            table = dense(irreps, out, degree)
            self.register_buffer(f"U_matrix_{degree}", table if out.l else table.squeeze(0))
            weight = torch.nn.Parameter(torch.randn(2, table.shape[-1], channels))
            if degree == correlation:
                self.weights_max = weight
            else:
                self.weights.append(weight)

    def forward(self, x, element):
        total = 0
        for degree, weight in enumerate((*reversed(self.weights), self.weights_max), 1):
            table = self.get_buffer(f"U_matrix_{degree}").to(x.dtype)
            table = table if table.dim() == degree + 2 else table[None]
            value = torch.einsum("ne,ekc,md...k->ncmd...", element, weight, table)
            for _ in range(degree):
                value = torch.einsum("nc...d,ncd->nc...", value, x)
            total = total + value
        return total.flatten(1)


class SymmetricContraction(torch.nn.Module):
    def __init__(self, irreps_in, irreps_out, correlations):
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        items = o3.Irreps([item.ir for item in self.irreps_in])
        self.contractions = torch.nn.ModuleList(
            Contraction(items, item.ir, degree, item.mul)
            for item, degree in zip(self.irreps_out, correlations, strict=True)
        )

    def forward(self, x, element):
        return torch.cat([part(x, element) for part in self.contractions], -1)


class MaceModel(torch.nn.Module):
    def __init__(self, correlations=(2, 2)):
        super().__init__()
        self.first = named("mace", InteractionBlock)()
        self.second = named("mace", InteractionBlock)()
        self.contraction = named("mace", SymmetricContraction)(X, X, correlations)

    def forward(self, x, y, weight, edge_index):
        x = self.second(self.first(x, y, weight, edge_index), y, weight, edge_index)
        features = torch.cat([x[:, :4, None], x[:, 4:].view(-1, 4, 3)], 2)
        element = torch.nn.functional.one_hot(torch.arange(len(x)) % 2, 2).to(x)
        return self.contraction(features, element)


class TensorProductScatter(torch.nn.Module):
    """As NequIP's."""

    def __init__(self):
        super().__init__()
        self.tp = product()

    def forward(self, x, edge_attr, edge_weight, edge_dst, edge_src):
        return summed(self.tp(x[edge_src], edge_attr, edge_weight), edge_dst, len(x))


class NequipModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tp_scatter = named("nequip", TensorProductScatter)()
        self.linear = E3nnLinear(OUT, X)

    def forward(self, x, y, weight, edge_index):
        for _ in range(2):
            x = self.tp_scatter(
                x=x, edge_attr=y, edge_weight=weight, edge_dst=edge_index[1], edge_src=edge_index[0]
            )
            x = self.linear(x)
        return x


EDGES = torch.tensor([[0, 1, 2, 2, 3, 0], [1, 0, 1, 1, 2, 3]])


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 16), (6, 4), (6, 20)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def results(model, edge_index, dtype):
    """The output and the gradients of a model's parameters."""
    model = copy.deepcopy(model).to(dtype)
    leaves = [a.to(dtype).requires_grad_() for a in inputs()]
    z = model(*leaves, edge_index)
    return [z.detach(), *torch.autograd.grad(z.sin().sum(), [*leaves, *model.parameters()])]


@pytest.mark.parametrize(
    ("kind", "adapt"), [(MaceModel, o3.from_mace), (NequipModel, o3.from_nequip)]
)
def test_a_model_gives_what_it_gave(kind, adapt):
    torch.manual_seed(0)
    model = kind()
    parameters = dict(model.named_parameters())
    others = EDGES.flip(0).roll(2, 1)
    exact = [results(model, edges, torch.float64) for edges in (EDGES, others)]
    plain = [results(model, edges, torch.float32) for edges in (EDGES, others)]
    state = model.state_dict()
    model = adapt(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    model.load_state_dict(state)
    edges = EDGES.clone()
    for true, noisy, given in zip(exact, plain, (EDGES, others), strict=True):
        edges.copy_(given)  # in place: a graph of these very tensors is no longer theirs
        for found, a, b in zip(results(model, edges, torch.float32), true, noisy, strict=True):
            noise = (b - a).abs()
            assert_as_accurate(found, a, noise + noise.max())


@pytest.mark.parametrize(
    ("kind", "adapt"), [(MaceModel, o3.from_mace), (NequipModel, o3.from_nequip)]
)
def test_no_product_of_e3nns_stays(kind, adapt):
    model = adapt(kind())
    kinds = {type(module).__module__ for module in model.modules()}
    assert not any(kind.startswith("e3nn") for kind in kinds)
    convolutions = [m for m in model.modules() if isinstance(m, o3.TensorProductConv)]
    assert len(convolutions) == (2 if kind is MaceModel else 1)


def test_a_graph_is_sorted_once_for_all_layers(monkeypatch):
    model, made, graph = o3.from_mace(MaceModel()), [], o3.Graph

    def counted(src, dst, *sizes):
        made.append(graph(src, dst, *sizes))
        return made[-1]

    monkeypatch.setattr("torchweft.o3.graph.Graph", counted)
    x, y, weight = inputs()
    edges = EDGES.clone()
    for _ in range(2):
        model(x, y, weight, edges)
    assert len(made) == 1


def test_what_is_no_such_model():
    with pytest.raises(DTypeError, match="from_mace was given a Linear: it must hold interactions"):
        o3.from_mace(torch.nn.Linear(1, 1))
    with pytest.raises(DTypeError, match="from_nequip was given a MaceModel: it must hold layers"):
        o3.from_nequip(MaceModel())


def test_a_model_that_cannot_be_turned_stays_as_it_was():
    """The error names the module."""
    model = torch.nn.Sequential(MaceModel((1, 2)))
    before = [(name, type(module)) for name, module in model.named_modules()]
    text = r"^0\.contraction cannot be converted: .*degrees \[1, 2\] for different irreps.*Give the"
    with pytest.raises(ShapeError, match=text):
        o3.from_mace(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_a_parametrized_contraction_says_what_to_do():
    """Seen red with: torch's error, which names no module."""
    model = MaceModel()
    part = model.contraction.contractions[0]
    parametrize.register_parametrization(part, "weights_max", torch.nn.Identity())
    text = r"^contraction cannot be converted: .* has the parameters .*Remove parametrizations"
    with pytest.raises(DTypeError, match=text):
        o3.from_mace(model)


def contents(model):
    """What every module holds, with its hooks."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[name, key] = dict(value) if isinstance(value, dict) else value
    return found


@pytest.mark.parametrize(
    ("kind", "adapt"), [(MaceModel, o3.from_mace), (NequipModel, o3.from_nequip)]
)
def test_a_last_layer_that_cannot_be_turned_leaves_the_model_as_it_was(kind, adapt):
    """Seen red with: interactions that are turned before, and stay so."""
    model = kind()
    model.late = E3nnLinear(OUT, X)
    model.late.instructions = [i._replace(path_weight=3.0) for i in model.late.instructions]
    before = contents(model)
    with pytest.raises(ShapeError, match=r"^late cannot be converted: .* has factors that neither"):
        adapt(model)
    assert contents(model) == before


def test_hooks_move_to_the_layer_that_replaces_theirs():
    model, called = torch.nn.Sequential(E3nnLinear(OUT, X)), []
    handle = model[0].register_forward_hook(lambda *args: called.append(args[0]))
    o3.from_e3nn(model)
    model(torch.ones(1, model[0].irreps_in.dim))
    assert called == [model[0]]
    handle.remove()
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_self_connections_of_a_record_read_no_types(embedded, dtype, monkeypatch):
    """Seen red with: rows of types counted by the host; attributes of another type."""
    torch.manual_seed(0)
    kind = named("e3nn", o3.FullyConnectedTensorProduct)
    embedding = torch.nn.Embedding(2, 2).to(dtype) if embedded else None
    layer = interactions.self_connection(kind(X, "2x0e", X).to(dtype), embedding).to(dtype)
    x, types = torch.randn(5, 16, dtype=dtype), torch.tensor([0, 1, 1, 0, 1])
    wide = copy.deepcopy(layer).double()
    wide.embedding = (copy.deepcopy(embedding).double() if embedded else None,)
    exact = wide(x.double(), types).detach()
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero", "cpu"):
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, name=name: pytest.fail(f"the run reads: {name}")
        )
    with Run():
        found = layer(x, types).detach()
    monkeypatch.undo()
    assert_within_bound(found, exact, exact.abs().max().expand_as(exact), 24)


class PolynomialCutoff(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.register_buffer("p", torch.tensor(p))
        self.register_buffer("r_max", torch.tensor(4.0))


def test_a_state_with_other_constants():
    """Constants of a state that fit by their shapes, but not by their values."""
    model = MaceModel()
    model.cutoff = named("mace", PolynomialCutoff)(6)
    state = model.state_dict()
    model = o3.from_mace(model)
    assert model.cutoff.p == 6
    model.load_state_dict({k: v.half() if k == "cutoff.r_max" else v for k, v in state.items()})
    assert o3.to_e3nn(model).keys() == state.keys()
    for other in (torch.tensor(5), torch.tensor([6])):
        with pytest.raises(
            RuntimeError, match=r"cutoff\.p is another table than that of the model"
        ):
            model.load_state_dict({**state, "cutoff.p": other})
    table = 2 * state["contraction.contractions.0.U_matrix_2"]
    with pytest.raises(RuntimeError, match="Load the state into a model of the original class"):
        model.load_state_dict({**state, "contraction.contractions.0.U_matrix_2": table})


class Skip(torch.nn.Module):
    """An interaction with weights by element, in a model whose forward is MACE's."""

    def __init__(self, elements):
        super().__init__()
        self.conv_tp = product()
        self.linear = E3nnLinear(OUT, X)
        kind = named("e3nn", o3.FullyConnectedTensorProduct)
        self.skip_tp = kind(X, f"{elements}x0e", X)

    def forward(self, x, y, weight, edge_index, attributes):
        return self.skip_tp(self.linear(self.conv_tp(x, y, weight, edge_index)), attributes)


def test_elements_are_chosen_where_they_are_one_hot():
    """Seen red with: mixtures taken for one-hot rows, no gradient of attributes that need one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(named("mace", Skip, "InteractionBlock")(6))
    model = o3.from_mace(model)[0].double()
    product, chosen = model.skip_tp, []
    product.call.elements = lambda attributes, find=product.call.elements: (
        chosen.append(find(attributes)) or chosen[-1]
    )
    x, element = torch.randn(7, 16, dtype=torch.float64), torch.tensor([0, 5, 2, 2, 1, 0, 5])
    attributes = torch.nn.functional.one_hot(element, 6).double()
    plain = o3.FullyConnectedTensorProduct(X, "6x0e", X).double()
    plain.load_state_dict(product.state_dict())
    attributes_ = attributes.clone()
    mixed = attributes + 0.25
    for given, one_hot in ((attributes_, True), (attributes_, True), (mixed, False)):
        exact = plain(x, given).detach()
        size = plain(x.abs(), given.abs()).detach().abs().max().expand_as(exact)
        assert_within_bound(product(x, given), exact, size, 24)
        assert (chosen[-1] is not None) == one_hot
    attributes_.copy_(attributes.flip(0))  # in place
    exact = plain(x, attributes_).detach()
    assert_within_bound(product(x, attributes_), exact, size, 24)
    assert chosen[-1].tolist() == element.flip(0).tolist()
    leaf = attributes.requires_grad_()
    (found,) = torch.autograd.grad(product(x, leaf).sum(), leaf)
    (exact,) = torch.autograd.grad(plain(x, leaf).sum(), leaf)
    assert chosen[-1] is None
    assert_within_bound(found, exact, exact.abs().max().expand_as(exact), 24)


@pytest.mark.parametrize(
    ("kind", "adapt"), [(MaceModel, o3.from_mace), (NequipModel, o3.from_nequip)]
)
def test_compiled(kind, adapt):
    torch.manual_seed(0)
    model = adapt(kind())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    exact = copy.deepcopy(model).double()(*(a.double() for a in inputs()), EDGES)
    noise = (model(*inputs(), EDGES) - exact).detach().abs()
    assert_as_accurate(compiled(*inputs(), EDGES), exact, noise + noise.max())


def marked(call):
    """A layer that is linear in attributes, which returns what it takes."""
    layer = torch.nn.Identity()
    call.mark([layer])
    return layer


def test_elements_are_not_read_in_a_run_that_a_graph_replays(monkeypatch):
    """Seen red with: the content of the last call taken for that of the replay."""
    call, attributes = Call(), torch.eye(3, dtype=torch.float64)
    layer = marked(call)
    with Run():
        assert call.elements(attributes) is None  # nothing is known of them
        assert layer(attributes) is attributes
    assert call.elements(attributes).tolist() == [0, 1, 2]
    shown = monkeypatch.setattr
    for name in ("item", "tolist", "__bool__", "__int__", "nonzero", "cpu"):
        shown(torch.Tensor, name, lambda *args, name=name: pytest.fail(f"the run reads: {name}"))
    with Run():
        element, taken = call.elements(attributes.flip(0)), layer(attributes.flip(0))
    monkeypatch.undo()
    assert element.tolist() == [2, 1, 0]
    assert (taken == attributes.flip(0)).all()
    call.elements(attributes + 1)
    with Run():
        assert call.elements(attributes) is None  # mixtures may come again


ODD_ROWS = {
    "zeros": [0, 0],
    "another number": [3, 0],
    "a negative one": [0, -1],
    "a mixture": [0.5, 0.5],
    "more than a one": [1, 1],
    "NaN": [math.nan, 1],
}


@pytest.mark.parametrize("name", ODD_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_of_one_hot_rows_has_nan_for_others(name, dtype):
    """Seen red with: the largest number of a mixture taken alone, NaN in all rows."""
    call, rows = Call(), torch.eye(2, dtype=dtype)[[0, 1, 1, 0]]
    layer = marked(call)
    call.elements(rows.clone())
    rows[2] = torch.tensor(ODD_ROWS[name])
    with Run():
        taken = layer(rows)
    assert taken.dtype == dtype
    assert taken[2].isnan().all()
    others = [0, 1, 3]
    assert (taken[others] == rows[others]).all()


def mapped_by_element():
    made = o3.from_mace(torch.nn.Sequential(named("mace", Skip, "InteractionBlock")(2)))
    return made[0].skip_tp, torch.randn(6, 16)


def contracted_by_element():
    return o3.from_mace(MaceModel()).contraction, torch.randn(6, 4, 4)


@pytest.mark.parametrize("make", [mapped_by_element, contracted_by_element])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_multiplies_by_attributes_where_no_layer_is_marked(make, dtype):
    """Layers without a model around them.  Seen red with: elements chosen in any record."""
    torch.manual_seed(0)
    layer, x = make()
    layer, x = layer.to(dtype), x.to(dtype)
    attributes = torch.eye(2, dtype=dtype)[[0, 1, 1, 0, 1, 0]]
    layer(x, attributes)
    rows = attributes * torch.tensor([1, 1, 0, 3, -1, 1], dtype=dtype)[:, None]
    rows[5] = 0.5
    exact = copy.deepcopy(layer).double()
    exact.call = Call()
    exact = exact(x.double(), rows.double()).detach()
    with Run():
        found = layer(x, rows).detach()
    assert_within_bound(found, exact, exact.abs().max().expand_as(exact), 24)


def test_weights_by_element_are_read_as_they_are(monkeypatch):
    """Seen red with: matrices of the elements that are copied and scaled in every call."""
    layer, x = mapped_by_element()
    given, mix = [], interactions.mix
    monkeypatch.setattr(interactions, "mix", lambda *a, **k: given.append(a[2]) or mix(*a, **k))
    layer(x, torch.eye(2)[[0, 1, 1, 0, 1, 0]])
    assert len(given) == 1
    assert given[0] is layer.weight


@pytest.mark.parametrize("edges", [0, 3])
def test_products_of_allegro_without_edges(edges):
    """A structure whose atoms have no neighbours.   Seen red with: sizes that torch is to find."""
    irreps = o3.Irreps("1x0e+1x1o")
    facts = {"mul": 2, "num_paths": 1, "base_dim1": 4, "base_dim2": 4, "instructions": [(1, 0, 0)]}
    of = SimpleNamespace(**facts, irreps_in1=irreps, irreps_in2=irreps, irreps_out=o3.Irreps("1o"))
    layer = allegro._Contracter(of)
    layer.weights = torch.nn.Parameter(torch.ones(2))
    index = torch.zeros(edges, dtype=torch.int64)
    assert layer(torch.ones(edges, 2, 4), torch.ones(1, 2, 4), index).shape == (edges, 2, 3)
    channels = allegro._WeightedChannels(
        SimpleNamespace(
            weight_numel=4,
            multiplicity_out=2,
            alpha=1.0,
            _num_irreps=2,
            _rtoi=torch.tensor([[1, 0, 0, 0], [0, 1, 1, 1]]),
        )
    )
    assert channels(torch.ones(edges, 4), torch.ones(edges, 4)).shape == (edges, 2, 4)
