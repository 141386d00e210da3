"""Whole potentials: MACE's model by its own layers, by ours, and by those of others.

    forces          z = (E / atoms, F), F = −∂E/∂x
    training step   L = Σ (E − E*)² / atoms² + Σ |F − F*|², its gradients, and Adam's update

of scale-shift MACE with two layers, l ≤ 3, correlation 3 and a cutoff of 5 Å, on shaken diamond of
Si and O (28 neighbours) or molecules of 9 atoms, with random weights.  A training step returns
(∂L/∂x, ∂L/∂θ), the second for those who keep MACE's parameters; Adam's rate is 0, so that weights
stay and calls can be compared.  The oracle is MACE's model in float64.

Each model is measured as it is and, on a GPU, recorded by `torchweft.capture`; there, ours and
MACE's own are compiled by Inductor too, which takes many minutes on a processor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Candidate, Case, Workload
from benchmarks.workloads.recipes import DTYPE, Random
from benchmarks.workloads.ways import AtFirst, Function, captured
from torchweft import o3
from torchweft.core.default_dtype import default_dtype
from torchweft.errors import BackendError

__all__ = [
    "FORCES",
    "OPS",
    "TRAINING",
    "Settings",
    "Structures",
    "as_given",
    "by_model",
    "compiled",
    "mace_model",
    "potential_cases",
    "structures_of",
]

FORCES, TRAINING = "forces", "training step with Adam"
OPS = (FORCES, TRAINING)
R_MAX, SPACING, SHAKE = 5.0, 5.43, 0.1  # Å
DRAWS = 8  # of positions: a crystal's energy is one number

Given = dict[str, Tensor]
Convert = Callable[[nn.Module], nn.Module]


class Structures(NamedTuple):
    """Diamond of `side`³ cubic cells of 8 atoms, or as many molecules of ethanol as `molecules`."""

    side: int = 0
    molecules: int = 0

    @property
    def elements(self) -> tuple[int, ...]:
        return (1, 6, 8) if self.molecules else (8, 14)


class Settings(NamedTuple):
    """Of the model."""

    hidden: str = "128x0e+128x1o"
    lmax: int = 3
    correlation: int = 3
    pair_repulsion: bool = False


TABLE = Settings()


def potential_cases(
    name: str, structures: Structures, settings: Settings = TABLE, check: int | None = None
) -> list[Case]:
    """A force call and a training step.

    Args:
        name: of both; what is done stands behind it.
        structures: what they are given.
        settings: of the model.
        check: cells a side, or molecules, of the check; None: all.
    """
    return [
        Case(
            f"{name} {mode}",
            mode,
            functools.partial(_workload, op, structures, settings),
            ("forward",),
            check_batch=check,
        )
        for op, mode in ((FORCES, "forces"), (TRAINING, "training"))
    ]


def by_model(
    name: str, workload: Workload, convert: Convert, *, own_parameters: bool = True
) -> list[Candidate]:
    """Somebody's model, as it is, and where there is a GPU recorded too.

    Args:
        name: of the peer.
        workload: one of OPS.
        convert: makes the model of a copy of MACE's in float32; called when it is first needed.
        own_parameters: whether it keeps MACE's, so that their gradients can be compared.
    """
    tables, (positions,) = workload.tables, workload.inputs

    def made(_: Tensor) -> Function:
        return _call(workload.op, convert(copy.deepcopy(tables["model"])), tables["given"])

    found = Candidate(
        name, "cuda" if positions.is_cuda else "torch", AtFirst(made), workload.inputs,
        workload.oracle,
    )  # fmt: skip
    if workload.op == TRAINING and not own_parameters:

        def oracle(positions: Tensor, *, scale: None = None) -> Tensor:
            gradients: Tensor = workload.oracle(positions, scale=scale)
            return gradients[: positions.numel()]

        function = functools.partial(_first_of, found.function)
        found = found._replace(function=function, inputs=(positions.clone(),), oracle=oracle)
    if not positions.is_cuda:
        return [found]
    return [found, found._replace(peer=f"{name} captured", function=captured(found.function))]


def compiled(convert: Convert = lambda model: model) -> Convert:
    """A model made anew without e3nn's own compiler, converted, and compiled by Inductor."""

    def made(model: nn.Module) -> nn.Module:
        from mace.tools import compile as preparing
        from mace.tools.scripts_utils import extract_model

        device = next(model.parameters()).device
        preparing.configure_autograd_for_compile()
        with preparing.disable_e3nn_codegen(), default_dtype(torch.float64):
            plain = extract_model(model.double(), map_location=device)
        simple = preparing.simplify(convert(plain.to(DTYPE)))
        return torch.compile(simple)  # type: ignore[no-any-return]

    return made


def _workload(
    op: str, structures: Structures, settings: Settings, device: torch.device, batch: int | None
) -> Workload:
    if batch:
        some = structures._fields[0 if structures.side else 1]
        structures = structures._replace(**{some: batch})
    atoms = structures_of(structures)
    given = as_given(atoms, structures.elements, device)
    exact = copy.deepcopy(mace_model(settings, structures.elements)).to(device)
    model = copy.deepcopy(exact).to(DTYPE)
    positions = given.pop("positions")
    labels = Random(device)
    given |= {"energy": labels.normal(len(atoms)), "forces": labels.normal(*positions.shape)}

    @functools.cache
    def plain(dtype: torch.dtype) -> Function:  # TorchScript compiles each copy of a model anew
        return _call(op, copy.deepcopy(exact).to(dtype), _as(given, dtype))

    def oracle(positions: Tensor, *, scale: None = None) -> Tensor:
        return plain(positions.dtype)(positions)

    # converted in the first call, or before it by `benchmarks.first_calls`
    ours = AtFirst(lambda _: _call(op, o3.from_mace(copy.deepcopy(model)), given))
    made = compiled(o3.from_mace)
    others = {
        "compiled": AtFirst(lambda _: _call(op, made(copy.deepcopy(model)), given)),
        "captured": captured(ours),
    }
    edges = given["edge_index"].shape[1]
    return Workload(
        op, (positions,), {"model": model, "given": given, "atoms": atoms, "ours": ours},
        lambda positions, backend=None: ours(positions), oracle, 0,
        4 * (len(atoms) + positions.numel()),
        f"atoms={len(positions)} E={edges} hidden={settings.hidden}", polynomial=False, draws=DRAWS,
        ways=others if device.type == "cuda" else {},  # Inductor takes minutes on a processor
    )  # fmt: skip


def structures_of(structures: Structures) -> list[Any]:
    """Of ASE, always the same."""
    try:
        from ase.build import bulk, molecule
    except ImportError as error:
        raise BackendError(_needed(error)) from error
    if structures.side:
        crystal = bulk("Si", "diamond", a=SPACING, cubic=True)
        crystal.symbols[::2] = "O"
        atoms = [crystal.repeat(structures.side)]
    else:
        atoms = [molecule("CH3CH2OH") for _ in range(structures.molecules)]
    for seed, some in enumerate(atoms):
        some.rattle(SHAKE, seed=seed)
    return atoms


def _needed(error: ImportError) -> str:
    return (
        f"cases of whole potentials are models of MACE, which cannot be imported ({error}). "
        "pip install mace-torch==0.3.16; benchmarks/peers/README.md lists wheels to carry."
    )


def as_given(atoms: list[Any], elements: tuple[int, ...], device: torch.device) -> Given:
    """What MACE's models take, edges by the atom that they add to."""
    try:
        from mace import data
        from mace.tools import AtomicNumberTable, torch_geometric
    except ImportError as error:
        raise BackendError(_needed(error)) from error
    table = AtomicNumberTable(elements)
    rows = [
        data.AtomicData.from_config(data.config_from_atoms(some), z_table=table, cutoff=R_MAX)
        for some in atoms
    ]
    found = torch_geometric.Batch.from_data_list(rows).to_dict()
    order = found["edge_index"][1].argsort(stable=True)
    found["edge_index"] = found["edge_index"][:, order]
    for name in ("shifts", "unit_shifts"):
        found[name] = found[name][order]
    kept = ("positions", "node_attrs", "edge_index", "batch", "ptr", "cell", "head", "pbc")
    return {name: found[name].to(device) for name in (*kept, "shifts", "unit_shifts")}


@functools.lru_cache
def mace_model(settings: Settings, elements: tuple[int, ...]) -> nn.Module:
    """In float64, with weights that float32 holds; seed 0."""
    import numpy as np
    from mace import modules

    # isort: split
    from e3nn import o3 as irreps_of  # after mace, which lets this version load its constants

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        model: nn.Module = modules.ScaleShiftMACE(
            r_max=R_MAX, num_bessel=8, num_polynomial_cutoff=5, max_ell=settings.lmax,
            interaction_cls=block, interaction_cls_first=block, num_interactions=2,
            num_elements=len(elements), hidden_irreps=irreps_of.Irreps(settings.hidden),
            MLP_irreps=irreps_of.Irreps("16x0e"), gate=torch.nn.functional.silu,
            atomic_energies=np.zeros(len(elements)), avg_num_neighbors=28.0,
            atomic_numbers=list(elements), correlation=settings.correlation,
            atomic_inter_scale=1.0, atomic_inter_shift=0.0,
            pair_repulsion=settings.pair_repulsion,
        )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPE))
    return model


def _as(given: Given, dtype: torch.dtype) -> Given:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}


def _call(op: str, model: nn.Module, given: Given) -> Function:
    """A function of positions."""
    if op == FORCES:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return functools.partial(_forces, model, given)
    fused = given["edge_index"].is_cuda
    adam = torch.optim.Adam(model.parameters(), lr=0.0, fused=fused, capturable=fused)
    return functools.partial(_step, model, given, adam)


def _forces(model: nn.Module, given: Given, positions: Tensor) -> Tensor:
    leaf = positions.detach().requires_grad_()
    with torch.enable_grad():  # forces are gradients, whoever asks for them
        # MACE's calculator asks a compiled model as for training: its graph is freed too early else
        found = model({**given, "positions": leaf}, training=hasattr(model, "_orig_mod"))
    return torch.cat([found["energy"].detach() / given["ptr"].diff(), found["forces"].flatten()])


def _step(model: nn.Module, given: Given, adam: torch.optim.Optimizer, positions: Tensor) -> Tensor:
    leaf = positions.detach().requires_grad_()
    sizes = given["ptr"].diff()
    adam.zero_grad()
    with torch.enable_grad():
        found = model({**given, "positions": leaf}, training=True)
        energy = (found["energy"] - given["energy"]) / sizes
        force = found["forces"] - given["forces"]
        (energy.square().sum() + force.square().sum()).backward()
    adam.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([gradient.flatten() for gradient in (leaf.grad, *gradients)])


def _first_of(function: Function, positions: Tensor) -> Tensor:
    """The part of a training step's gradients that no other parameters change."""
    return function(positions)[: positions.numel()]
