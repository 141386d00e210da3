"""A converted model beside its original: the same numbers, in fewer operations."""

import collections

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft.core.default_dtype import default_dtype

__all__ = [
    "assert_agree",
    "begun",
    "counted",
    "default_dtype",
    "names_of",
    "operations",
    "properties",
    "trained",
]

VIEWS = {"view", "_unsafe_view", "expand", "select", "slice", "unsqueeze", "squeeze", "permute"}
VIEWS |= {"transpose", "t", "unbind", "split", "split_with_sizes", "alias", "detach", "as_strided"}
VIEWS |= {"unfold", "diagonal"}
MEMORY = {"empty", "new_empty", "empty_like", "empty_strided", "lift_fresh", "resolve_neg"}
MEMORY |= {"resolve_conj", "result_type", "reshape", "flatten", "matmul", "to", "_to_copy"}
MEMORY |= {"contiguous", "narrow", "_reshape_alias", "expand_as", "numpy_T", "promote_types"}
"""Operations that begin others, views or none."""


def assert_agree(found, exact, rounded, dtype=torch.float64, multiple=16):
    """Errors at most a few times those of the original's float32 results, by the precision.

    Args:
        found: results by name, of the model under test.
        exact: of the original in float64.
        rounded: of the original in float32.
        dtype: that the model under test computes in.
        multiple: of the errors.
    """
    assert found.keys() == exact.keys()
    eps = torch.finfo(dtype).eps
    for name, value in exact.items():
        noise = (rounded[name] - value).abs().max() * eps / torch.finfo(torch.float32).eps
        error = (found[name] - value).abs().max()
        bound = multiple * (noise + eps * value.abs().max())
        assert error <= bound, (name, float(error), float(bound))


def trained(model, energy, forces):
    """Energies, forces, and gradients of a loss of forces.

    Args:
        model: in training mode.
        energy: a function of positions.
        forces: of positions that need a gradient.
    """
    found = {"energy": energy.detach(), "forces": forces.detach()}
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    loss = forces.sin().sum() + energy.sum()
    grads = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return found | {n: g for n, g in zip(names, grads, strict=True) if g is not None}


def properties(atoms, calculator):
    """Energy, forces and, of a solid, stress by a calculator of ASE."""
    atoms = atoms.copy()
    atoms.calc = calculator
    found = [np.array(atoms.get_potential_energy()), atoms.get_forces()]
    if atoms.pbc.all():
        found.append(atoms.get_stress())
    return [torch.as_tensor(t, dtype=torch.float64) for t in found]


def operations(function):
    """The number of torch's operations of a call, without views."""
    return counted(function).total()


def begun(function):
    """How often a call begins each of torch's operations but views and new memory.

    By the profiler: nobody watches, so that kernels and loops serve as they do for users.
    """
    function()  # tables are made once, loops compiled
    function()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        function()
    return collections.Counter(
        event.name.removeprefix("aten::")
        for event in profile.events()
        if _computes(event) and not any(map(_computes, _around(event)))
    )


def _computes(event):
    name = event.name.removeprefix("aten::").rstrip("_")
    return event.name.startswith("aten::") and name not in VIEWS | MEMORY


def _around(event):
    while (event := event.cpu_parent) is not None:
        yield event


def counted(function):
    """How often a call uses each of torch's operations but views."""
    counts = collections.Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            name = operation._schema.name.partition("::")[2]
            if name not in VIEWS:
                counts[name] += 1
            return operation(*args, **(kwargs or {}))

    function()  # tables are made once
    with Counting():
        function()
    return counts


def names_of(model, package):
    """The modules of a package in a model."""
    return [n for n, m in model.named_modules() if type(m).__module__.startswith(package)]
