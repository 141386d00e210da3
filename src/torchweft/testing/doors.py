"""The contract of an operation's doors: how torch's own machinery may enter it.

These promises do not depend on the backend's body.  All but `check_cuda_graph` run anywhere, in
float64, and compare with the oracle passed through the same machinery.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchweft.testing.contract import Case, Problem, assert_same_bits, evaluate, judge, pose

__all__ = [
    "DOOR_CHECKS",
    "assert_doors",
    "check_autocast",
    "check_checkpoint",
    "check_compile",
    "check_cuda_graph",
    "check_default_device",
    "check_export",
    "check_forward_mode",
    "check_in_place",
    "check_meta",
    "check_numerical",
    "check_opcheck",
    "check_transforms",
    "check_vmap",
]

Function = Callable[..., Tensor]


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of torchweft's own operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "torchweft":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def check_opcheck(case: Case, device: str = "cpu") -> None:
    """torch.library.opcheck of every operator that the call and its gradients use.

    Without gradients, and with them.
    """
    problem = pose(case, device=device)
    with _Calls() as calls:
        evaluate(case.call, problem)
    if not calls.found:
        raise AssertionError(f"{case.name} calls no operator of torchweft")
    for op, args in calls.found[:3]:  # the value and the first gradients
        torch.library.opcheck(op, _each_float(torch.Tensor.detach, args))
        torch.library.opcheck(op, _each_float(_leaf, args))


def check_numerical(case: Case, device: str = "cpu") -> None:
    """Gradients of both orders agree with differences, and forward mode with backward mode."""
    problem = pose(case, device=device).map(_leaf)
    leaves, function = _over_given(problem, functools.partial(case.call, **problem.tables))
    torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def check_compile(case: Case, device: str = "cpu") -> None:
    """torch.compile(fullgraph=True, dynamic=True), forward and backward, changes no bit.

    The plain call comes first: what is built once, like a kernel map, is there when it is traced.
    """
    problem = pose(case, device=device)
    torch.compiler.reset()  # else each case counts as one more recompilation of `function`

    def function(inputs: Sequence[Tensor | None], tables: dict[str, Any]) -> Tensor:
        return case.call(*inputs, **tables)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        leaves = problem.map(_leaf).inputs
        value = run(leaves, problem.tables)
        gradients = torch.autograd.grad(value, _given(leaves), problem.cotangent)
        results.append([value, *gradients])
    for expected, out in zip(*results, strict=True):
        assert_same_bits(out, expected, f"{case.name}, compiled")


def check_export(case: Case, device: str = "cpu") -> None:
    """torch.export gives a program that returns the same bits."""
    problem = pose(case, device=device)
    inputs, function = _over_given(problem, functools.partial(case.call, **problem.tables))

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return function(*inputs)

    expected = function(*inputs)  # first, as in check_compile
    program = torch.export.export(Module(), inputs)
    assert_same_bits(program.module()(*inputs), expected, f"{case.name}, exported")


def check_transforms(case: Case, device: str = "cpu") -> None:
    """torch.func: grad, jvp, jacrev, jacfwd, and the gradient of a gradient."""
    problem = pose(case, device=device)
    given = tuple(i for i, a in enumerate(problem.inputs) if a is not None)

    def grad(f: Function, p: Problem) -> Any:
        def loss(*inputs: Tensor | None) -> Tensor:
            return (f(*inputs) * p.cotangent).sum()

        return torch.func.grad(loss, argnums=given)(*p.inputs)

    def grad_of_grad(f: Function, p: Problem) -> Any:
        def moved(*inputs: Tensor | None) -> Tensor:
            gradient: Tensor = grad(f, p._replace(inputs=inputs))[0]
            return (gradient * _given(p.tangents)[0]).sum()

        return torch.func.grad(moved, argnums=given[1:])(*p.inputs)

    def jvp(f: Function, p: Problem) -> Any:
        inputs, function = _over_given(p, f)
        return torch.func.jvp(function, inputs, _given(p.tangents))[1]

    def jacobian(f: Function, p: Problem) -> Any:
        return torch.func.jacrev(f, argnums=given)(*p.inputs)

    def forward_jacobian(f: Function, p: Problem) -> Any:
        return torch.func.jacfwd(f, argnums=given)(*p.inputs)

    for transform in (grad, grad_of_grad, jvp, jacobian, forward_jacobian):
        _assert_same_under(transform, case, problem)


def check_vmap(case: Case, device: str = "cpu") -> None:
    """torch.vmap over each subset of the inputs, also under a gradient."""
    problem = pose(case, device=device)
    given = [i for i, a in enumerate(problem.inputs) if a is not None]
    for mapped in range(1, 2 ** len(given)):
        over = {i for bit, i in enumerate(given) if mapped >> bit & 1}

        def vmap(f: Function, p: Problem, over: set[int] = over) -> Tensor:
            dims = tuple(0 if i in over else None for i in range(len(p.inputs)))
            inputs = [
                torch.stack([a, t]) if i in over else a  # type: ignore[list-item]
                for i, (a, t) in enumerate(zip(p.inputs, p.tangents, strict=True))
            ]
            mapped: Tensor = torch.vmap(f, dims)(*inputs)
            return mapped

        def gradients(f: Function, p: Problem, vmap: Function = vmap) -> Any:
            leaves = p.map(_leaf)
            value = vmap(f, leaves)
            cotangent = torch.stack([p.cotangent, p.cotangent])
            return torch.autograd.grad(value, _given(leaves.inputs), cotangent)

        _assert_same_under(vmap, case, problem)
        _assert_same_under(gradients, case, problem)


def check_forward_mode(case: Case, device: str = "cpu") -> None:
    """Dual numbers outside of torch.func carry their tangents through."""
    problem = pose(case, device=device)

    def tangent(f: Function, p: Problem) -> Tensor:
        dual: Any = torch.autograd.forward_ad
        with dual.dual_level():
            pairs = zip(p.inputs, p.tangents, strict=True)
            value = f(*(None if a is None else dual.make_dual(a, t) for a, t in pairs))
            found: Tensor = dual.unpack_dual(value).tangent
            return found

    _assert_same_under(tangent, case, problem)


def check_autocast(case: Case, device: str = "cpu") -> None:
    """Under autocast float32 inputs are computed in the low precision, gradients stay float32."""
    low = torch.bfloat16
    # values that both precisions hold: the cast itself then changes nothing
    problem = pose(case, device=device).map(lambda a: a.to(low).float())
    leaves = problem.map(_leaf).inputs
    with torch.autocast(device, dtype=low):
        value = case.call(*leaves, **problem.tables)
    if value.dtype != low:
        raise AssertionError(f"{case.name}: {value.dtype} under autocast to {low}")
    gradients = torch.autograd.grad(value, _given(leaves), problem.cotangent.to(low))
    for a, gradient in zip(_given(leaves), gradients, strict=True):
        if gradient.dtype != a.dtype or not gradient.isfinite().all():
            raise AssertionError(f"{case.name}: a gradient under autocast is {gradient.dtype}")
    narrow = problem.map(lambda a: a.to(low))
    judge(case, narrow, _value, {"value": value}, "under autocast")


def check_meta(case: Case, device: str = "cpu") -> None:
    """Tensors without storage give the shape and the dtype of the result."""
    problem = pose(case, device=device)
    meta = problem.map(lambda a: a.to("meta"))
    tables = {k: t.to("meta") if isinstance(t, Tensor) else t for k, t in problem.tables.items()}
    found, expected = case.call(*meta.inputs, **tables), meta.cotangent
    if found.shape != expected.shape or found.dtype != expected.dtype or not found.is_meta:
        raise AssertionError(f"{case.name}: meta gives {found.dtype} {tuple(found.shape)}")


def check_checkpoint(case: Case, device: str = "cpu") -> None:
    """Recomputing the value in the backward pass gives the same gradients, to the bit."""
    problem = pose(case, device=device)
    results = []
    for again in (True, False):
        leaves, function = _over_given(
            problem.map(_leaf), functools.partial(case.call, **problem.tables)
        )
        if again:
            value = torch.utils.checkpoint.checkpoint(function, *leaves, use_reentrant=False)
        else:
            value = function(*leaves)
        results.append(torch.autograd.grad(value, leaves, problem.cotangent))
    for out, expected in zip(*results, strict=True):
        assert_same_bits(out, expected, f"{case.name}, checkpointed")


def check_default_device(case: Case, device: str = "cpu") -> None:
    """Tensors are used where they are, whatever torch.set_default_device says."""
    problem = pose(case, device=device)
    results = []
    for default in ("meta", device):
        leaves, function = _over_given(
            problem.map(_leaf), functools.partial(case.call, **problem.tables)
        )
        with torch.device(default):
            value = function(*leaves)
            results.append([value, *torch.autograd.grad(value, leaves, problem.cotangent)])
    for out, expected in zip(*results, strict=True):
        assert_same_bits(out, expected, f"{case.name}, by another default device")


def check_in_place(case: Case, device: str = "cpu") -> None:
    """The caller may write to a result that has gradients: `z += bias`, `z.relu_()`."""
    problem = pose(case, device=device)
    value = case.call(*problem.map(_leaf).inputs, **problem.tables)
    value.mul_(2)


def check_cuda_graph(case: Case, device: str = "cuda") -> None:
    """Value and gradients captured once and replayed on changed inputs give the same bits."""
    problem = pose(case, device=device, dtype=torch.float32)
    static = problem.map(_leaf)

    def run(p: Problem) -> list[Tensor]:
        value = case.call(*p.inputs, **p.tables)
        return [value.detach(), *torch.autograd.grad(value, _given(p.inputs), p.cotangent)]

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static)  # builds plans and compiles kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    changed = problem.map(lambda a: a.flip(0) * 2)
    with torch.no_grad():
        for old, new in zip(_given(static.inputs), _given(changed.inputs), strict=True):
            old.copy_(new)
        static.cotangent.copy_(changed.cotangent)
    graph.replay()
    for out, expected in zip(captured, run(changed.map(_leaf)), strict=True):
        assert_same_bits(out, expected, f"{case.name}, replayed")


DOOR_CHECKS: tuple[Callable[..., None], ...] = (
    check_opcheck,
    check_numerical,
    check_compile,
    check_export,
    check_transforms,
    check_vmap,
    check_forward_mode,
    check_autocast,
    check_meta,
    check_checkpoint,
    check_in_place,
)
"""The promises of the doors on any device; `check_cuda_graph` needs a GPU."""


def assert_doors(case: Case, *, device: str = "cpu") -> None:
    """Every promise that does not depend on the backend's body, for one case."""
    for check in DOOR_CHECKS:
        check(case, device)
    if device == "cuda":
        check_cuda_graph(case)


def _leaf(a: Tensor) -> Tensor:
    return a.detach().clone().requires_grad_()


def _each_float(function: Function, args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with every real tensor replaced, also those in lists."""

    def replace(a: Any) -> Any:
        return function(a) if isinstance(a, Tensor) and a.is_floating_point() else a

    found: tuple[Any, ...] = torch.utils._pytree.tree_map(replace, tuple(args))
    return found


def _given(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(a for a in tensors if a is not None)


def _over_given(problem: Problem, function: Function) -> tuple[tuple[Tensor, ...], Function]:
    """The inputs that are not None, and the function of these alone."""

    def of_given(*given: Tensor) -> Tensor:
        rest = iter(given)
        return function(*(None if a is None else next(rest) for a in problem.inputs))

    return _given(problem.inputs), of_given


def _value(function: Function, problem: Problem) -> dict[str, Tensor]:
    return {"value": function(*problem.inputs, **problem.tables)}


def _assert_same_under(
    transform: Callable[[Function, Problem], Any], case: Case, problem: Problem
) -> None:
    """A transformation of the call equals that of the oracle, within the bound."""

    def run(function: Function, problem: Problem) -> dict[str, Tensor]:
        results = transform(functools.partial(function, **problem.tables), problem)
        return {str(i): r for i, r in enumerate(torch.utils._pytree.tree_leaves(results))}

    judge(case, problem, run, run(case.call, problem), f"under {transform.__name__}")
