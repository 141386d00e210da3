"""cuEquivariance's segmented polynomials; `pip install cuequivariance-torch` and its kernels."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.case import Candidate, Workload
from benchmarks.workloads import contraction, potential, training
from benchmarks.workloads.equivariant import Layer, blocks, coefficients_of
from benchmarks.workloads.training import Convolution, Library
from benchmarks.workloads.uuu import START, coefficients, paths
from torchweft.o3 import Gate, Irreps, Linear, wigner_3j
from torchweft.o3.tensor_product.instructions import weight_sizes

NAME = "cuEquivariance"


def missing() -> str | None:
    if importlib.util.find_spec("cuequivariance_torch") is None:
        return "not installed: pip install cuequivariance-torch"
    if torch.cuda.is_available():
        try:  # without them it computes by loops in plain torch, which is no peer
            importlib.import_module("cuequivariance_ops_torch")
        except (ImportError, OSError) as error:
            return f"its kernels do not load ({error}): pip install cuequivariance-ops-torch-cu13"
    return None


def adapt(workload: Workload) -> Candidate | list[Candidate] | str:
    if workload.op.startswith("tensor product"):
        return _of_layer(workload)
    if workload.op in potential.OPS:  # the weights of its contractions are of another basis
        return potential.by_model(NAME, workload, _potential, own_parameters=False)
    if workload.op == training.OP:
        backend = "cuda" if workload.inputs[0].is_cuda else "torch"
        return training.by_library(NAME, backend, workload, library())
    if workload.op == contraction.OP:
        return _contraction(workload)
    if workload.op != "uuu":
        return f"{workload.op} is no layer of cuEquivariance"
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    x, y, w = workload.inputs
    components, channels = x.shape[1:]
    product = cue.SegmentedTensorProduct.from_subscripts("u,u,u,u")
    for operand, rows in enumerate((len(paths()), components, components, components)):
        product.add_segments(operand, rows * [(channels,)])
    for p, (l1, l2, l3) in enumerate(paths()):
        table = coefficients(l1, l2, l3)
        for i, j, k in np.argwhere(table).tolist():
            product.add_path(p, START[l1] + i, START[l2] + j, START[l3] + k, c=table[i, j, k])
    polynomial = cue.SegmentedPolynomial.eval_last_operand(product)
    layer = cuet.SegmentedPolynomial(polynomial, "uniform_1d" if x.is_cuda else "naive").to(x)

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return layer([w, x, y])[0]

    def oracle(x: Tensor, y: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        rows = (x.unflatten(1, (components, channels)), y.unflatten(1, (components, channels)))
        weights = w.unflatten(1, (len(paths()), channels)).squeeze(0)
        return workload.oracle(*rows, weights, scale=scale).flatten(1)

    inputs = (x.flatten(1), y.flatten(1), w.flatten().unsqueeze(0))
    return Candidate(NAME, "cuda" if x.is_cuda else "torch", function, inputs, oracle)


def _potential(model: torch.nn.Module) -> torch.nn.Module:
    """As MACE turns it."""
    from mace.cli.convert_e3nn_cueq import run

    turned: torch.nn.Module = run(model, device=next(model.parameters()).device.type)
    return turned


def _of_layer(workload: Workload) -> Candidate | str:
    """Channelwise products of one number of channels; gathers and sums are its kernel's."""
    layer: Layer = workload.tables["layer"]
    if _mode_and_channels(layer) is None:
        return "its fast kernel takes channelwise products of one number of channels"
    x = workload.inputs[0]
    src, dst = workload.tables.get("src"), workload.tables.get("dst")
    if src is not None:
        conv = convolution(layer, x)
        function = lambda x, y, w: conv(x, y, w, src, dst)  # noqa: E731
    else:
        product = _module(layer, x)

        def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return product([w if w.dim() == 2 else w.unsqueeze(0), x, y])[0]

    return Candidate(
        NAME, "cuda" if x.is_cuda else "torch", function, workload.inputs, workload.oracle
    )


def convolution(layer: Layer, like: Tensor) -> Convolution:
    """Of a layer of one number of channels and one channelwise mode."""
    module, width = _module(layer, like), layer.out.dim

    def function(x: Tensor, y: Tensor, w: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        shapes = {0: x.new_empty(len(x), width)}
        given = {"input_indices": {1: src}, "output_shapes": shapes, "output_indices": {0: dst}}
        found: Tensor = module([w, x, y], **given)[0]
        return found

    return function


def library() -> Library:
    """Its layers, all of ir_mul; gates, which it has not, are plain torch."""
    return Library(
        convolution, _harmonics, _linear, _by_element, _gate, _turned, _turned_back,
        by_rows_of_elements=True,
    )  # fmt: skip


def _harmonics(irreps: Irreps, like: Tensor) -> Callable[[Tensor], Tensor]:
    import cuequivariance_torch as cuet

    method = "uniform_1d" if like.is_cuda else "naive"
    degrees = [ir.l for _, ir in irreps]
    return cuet.SphericalHarmonics(degrees, True, like.device, like.dtype, method=method)


def _linear(linear: Linear, like: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    method = "naive"  # torch's matrix products, its default
    module = _linear_module(linear, like, method, linear.irreps_in)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return module(x, w.unsqueeze(0))

    return function


def _by_element(linear: Linear, like: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Rows must be sorted by element.

    Items of one irrep are joined to one: of several paths into an item of the output, its
    `indexed_linear` 0.13 computes all and returns the first.
    """
    method = "indexed_linear" if like.is_cuda else "naive"
    module = _linear_module(linear, like, method, linear.irreps_in.regroup())

    def function(x: Tensor, w: Tensor, element: Tensor) -> Tensor:
        return module(_joined(linear.irreps_in, x), w, element)

    return function


def _joined(irreps: Irreps, x: Tensor) -> Tensor:
    """Rows of irreps.regroup()."""
    parts, together = blocks(irreps, x), {}
    for place in irreps.sort().inv:
        together.setdefault(irreps[place].ir, []).append(parts[place])
    return torch.cat([torch.cat(same, 2).flatten(1) for same in together.values()], 1)


def _turned(linear: Linear, weight: Tensor) -> Tensor:
    """A matrix for each item of the output: those of our items in, one below the other."""
    parts = weight.split(weight_sizes(linear.instructions), 1)
    return torch.cat([parts[n] for n in _order(linear)], 1)


def _turned_back(linear: Linear, weight: Tensor) -> Tensor:
    order, sizes = _order(linear), weight_sizes(linear.instructions)
    parts = weight.split([sizes[n] for n in order], 1)
    return torch.cat([parts[order.index(n)] for n in range(len(order))], 1)


def _order(linear: Linear) -> list[int]:
    """Our instructions in the order of their weights: by irrep, then by item of the output."""
    out = [i.i_out for i in linear.instructions]
    return sorted(range(len(out)), key=lambda n: (linear.irreps_out[out[n]].ir, out[n]))


def _linear_module(linear: Linear, like: Tensor, method: str, irreps_in: Irreps) -> torch.nn.Module:
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    irreps = (cue.Irreps(cue.O3, str(some)) for some in (irreps_in, linear.irreps_out))
    return cuet.Linear(
        *irreps,
        layout=cue.ir_mul,
        internal_weights=False,
        weight_classes=linear.num_elements or 1,
        device=like.device,
        dtype=like.dtype,
        method=method,
    )


def _gate(gate: Gate, like: Tensor) -> Callable[[Tensor], Tensor]:
    """silu(s), and sigmoid(g) y, of rows (s, g, y): a number for every copy of y."""
    factors = [part.acts[0].cst for part in (gate.act_scalars, gate.act_gates) if len(part.acts)]
    counts = [gate.irreps_scalars.dim, gate.irreps_gates.dim]

    def function(x: Tensor) -> Tensor:
        scalars, gates, gated = x.split([*counts, gate.irreps_gated.dim], 1)
        found, first, begin = [factors[0] * torch.nn.functional.silu(scalars)], 0, 0
        for mul, ir in gate.irreps_gated:
            block = gated[:, begin : begin + mul * ir.dim].unflatten(1, (ir.dim, mul))
            numbers = factors[1] * torch.sigmoid(gates[:, first : first + mul])
            found.append((block * numbers.unsqueeze(1)).flatten(1))
            first, begin = first + mul, begin + mul * ir.dim
        return torch.cat(found, 1)

    return function


def _contraction(workload: Workload) -> Candidate:
    """MACE's, which asks it for weights in MACE's order."""
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    x, _ = workload.inputs
    tables = workload.tables
    group = _e3nn_group()
    layer = cuet.SymmetricContraction(
        cue.Irreps(group, str(tables["irreps"])),
        cue.Irreps(group, str(tables["out"])),
        contraction_degree=tables["correlation"],
        num_elements=tables["elements"],
        layout=cue.ir_mul,
        original_mace=True,
        device=x.device,
        dtype=x.dtype,
        math_dtype=x.dtype,
        method="uniform_1d" if x.is_cuda else "naive",
    )
    element = tables["element"].int()

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": w}, (x, element))

    backend = "cuda" if x.is_cuda else "torch"
    return Candidate(NAME, backend, function, workload.inputs, workload.oracle)


def _e3nn_group() -> type:
    """O(3) with e3nn's couplings, and its order, which numbers the weights."""
    import cuequivariance as cue

    class E3nn(cue.O3):
        @classmethod
        def clebsch_gordan(cls, *given: cue.O3) -> np.ndarray:
            first, second, third = given
            if first.p * second.p != third.p:
                return np.zeros((0, first.dim, second.dim, third.dim))
            table = wigner_3j(first.l, second.l, third.l) * third.dim**0.5
            return table.numpy()[None]

        def __lt__(self, other: cue.O3) -> bool:
            return (self.l, self.p) < (other.l, other.p)

        @classmethod
        def iterator(cls) -> Iterator[cue.O3]:
            return (cls(l=ir.l, p=ir.p) for ir in super().iterator())

        def __mul__(self, other: cue.O3) -> Iterator[cue.O3]:
            return (E3nn(l=ir.l, p=ir.p) for ir in super().__mul__(other))

    return E3nn


def _mode_and_channels(layer: Layer) -> tuple[str, int] | None:
    modes = {instruction[3] for instruction in layer.instructions}
    channels = {mul for mul, _ in layer.x} | {mul for mul, _ in layer.out}
    if modes not in ({"uvu"}, {"uuu"}) or len(channels) > 1:
        return None
    return modes.pop(), channels.pop()


def _module(layer: Layer, like: Tensor) -> torch.nn.Module:
    """The layer of [weights, x, y]."""
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    found = _mode_and_channels(layer)
    assert found is not None
    mode, mul = found
    product = cue.SegmentedTensorProduct.from_subscripts("u,u,,u" if mode == "uvu" else "u,u,u,u")
    product.add_segments(0, len(layer.instructions) * [(mul,)])
    product.add_segments(1, sum(ir.dim for _, ir in layer.x) * [(mul,)])
    product.add_segments(2, sum(ir.dim for _, ir in layer.y) * [() if mode == "uvu" else (mul,)])
    product.add_segments(3, sum(ir.dim for _, ir in layer.out) * [(mul,)])
    first = [
        np.cumsum([0, *(ir.dim for _, ir in irreps)]) for irreps in (layer.x, layer.y, layer.out)
    ]
    tables = coefficients_of(layer)
    for p, ((i, j, k, *_), table) in enumerate(zip(layer.instructions, tables, strict=True)):
        for a, b, m in np.argwhere(table.numpy()).tolist():
            places = (p, first[0][i] + a, first[1][j] + b, first[2][k] + m)
            product.add_path(*map(int, places), c=float(table[a, b, m]))
    polynomial = cue.SegmentedPolynomial.eval_last_operand(product)
    method = "uniform_1d" if like.is_cuda else "naive"
    return cuet.SegmentedPolynomial(polynomial, method).to(like)
