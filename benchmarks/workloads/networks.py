"""Whole transformers, GATr and L-GATr 2: by the originals' layers, and by ours.

    forward         z, the multivectors and scalars that come out, in one row
    training step   L = mean (z − z*)², its gradients, and Adam's update

of random multivectors and scalars, with random weights that all share.  A training step returns
∂L/∂θ, each network's for its own parameters; Adam's rate is 0, so that weights stay and calls can
be compared.  The oracle is our network in plain torch and float64, its gradients turned into the
originals' parameters; an original must be the same function there.  How large errors may be is
told by plain torch, of the originals by their own layers, in float32 or under autocast.

Each network is measured as it is and, on a GPU, recorded by `torchweft.capture`; originals are
compiled by Inductor too, which takes minutes on a processor.  (Ours gained 0.4 % by that.)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.case import Candidate, Case, Workload
from benchmarks.workloads.recipes import DTYPE, Random
from benchmarks.workloads.ways import Function, captured
from torchweft.clifford import LGATR_2, GATr, LGATr
from torchweft.errors import WeftError
from torchweft.testing.bounds import accuracy_ratio, plain_error

__all__ = ["Network", "Settings", "by_original", "network_cases"]

FORWARD, TRAINING = "forward", "training step with Adam"

Network = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Settings(NamedTuple):
    """Of a network, which takes and gives one multivector and one scalar an item."""

    kind: str  # GATr, L-GATr
    batch: int
    items: int
    features: int = 16
    scalars: int = 128
    blocks: int = 10
    heads: int = 8
    autocast: bool = False  # to bfloat16


def network_cases(name: str, settings: Settings) -> list[Case]:
    """A forward pass and a training step; what is done stands behind the name of both."""
    return [
        Case(
            f"{name} {mode.partition(' ')[0]}",
            mode,
            functools.partial(_workload, mode, settings),
            ("forward",),
            torch.bfloat16 if settings.autocast else DTYPE,
        )
        for mode in (FORWARD, TRAINING)
    ]


def by_original(
    name: str,
    workload: Workload,
    original: nn.Module,
    convert: Convert,
    compiled: Network,
    plain: Network | None = None,
) -> list[Candidate]:
    """The original network with our weights, as it is, and in the ways of a GPU.

    Args:
        name: of the peer.
        workload: of `network_cases`.
        original: the network; its weights are overwritten.
        convert: turns its parameters, by name, into ours.
        compiled: how it is called when it is compiled.
        plain: how it is called as it is; None: as any module.
    """
    given, inputs, mode = workload.tables, workload.inputs, workload.tables["mode"]
    parameters = _Parameters(original.to(inputs[0].device), given["network"], convert)
    parameters.share()
    call: Callable[..., Function] = given["call"]

    def expected(*inputs: Tensor) -> Tensor:
        found = workload.oracle(*inputs)
        return parameters.gradients(found) if mode == TRAINING else found

    def oracle(*inputs: Tensor, scale: None = None) -> Tensor:
        return (functions[""] if inputs[0].dtype == DTYPE else expected)(*inputs)

    exact = copy.deepcopy(original).double()
    _check_same(call(exact, exact), expected, inputs)
    cuda = inputs[0].is_cuda
    functions = _ways(call(original, plain or original), call(original, compiled), cuda)
    own = tuple(a.clone() for a in inputs)  # its oracle is another
    return [
        Candidate(f"{name} {way}".rstrip(), "cuda" if cuda else "torch", function, own, oracle)
        for way, function in functions.items()
    ]


def _check_same(original: Function, expected: Function, inputs: Sequence[Tensor]) -> None:
    """Raise unless both agree in float64, to float32's error, on the first of the batch."""
    first = [a[:1] for a in inputs]
    double = [a.double() for a in first]
    found, exact = original(*double), expected(*double)
    ratio = accuracy_ratio(found, exact, plain_error(expected(*first), exact, DTYPE))
    if ratio > 1:
        raise WeftError(
            f"in float64 it differs from the oracle by {ratio:.3g} times what float32 explains: "
            "both must compute the same. Build both networks with the same options."
        )


def _workload(mode: str, settings: Settings, device: torch.device, batch: int | None) -> Workload:
    settings = settings._replace(batch=batch or settings.batch)
    random, rows = Random(device), (settings.batch, settings.items, 1)
    inputs = (random.normal(*rows, 16), random.normal(*rows))
    target = random.normal(17 * settings.batch * settings.items)
    call = functools.partial(_call, mode, settings.autocast, target)
    torch.manual_seed(0)
    network = _network(settings).to(device)
    plain = _network(settings, backend="torch").to(device)

    def oracle(*inputs: Tensor, scale: None = None) -> Tensor:
        plain.to(inputs[0].dtype).load_state_dict(network.state_dict())
        return call(plain, _blades_last(plain))(*inputs)

    function = call(network, _blades_last(network))
    shape = " ".join(f"{k}={v}" for k, v in settings._asdict().items() if k != "kind")
    return Workload(
        settings.kind, inputs,
        {"mode": mode, "settings": settings, "network": network, "call": call},
        lambda *inputs, backend=None: function(*inputs), oracle, 0, target.nbytes, shape,
        polynomial=False, ways={"captured": captured(function)} if device.type == "cuda" else {},
    )  # fmt: skip


def _network(settings: Settings, backend: str | None = None) -> nn.Module:
    _, _, _, features, scalars, blocks, heads, _ = settings
    options: dict[str, Any] = {"blocks": blocks, "heads": heads, "backend": backend}
    if settings.kind == "GATr":
        return GATr(1, 1, features, 1, 1, scalars, **options)
    options |= {"activation": "gelu_tanh", "options": LGATR_2}
    return LGATr(1, 1, features, 1, 1, scalars, **options)


def _blades_last(network: Network) -> Network:
    """As the originals take multivectors."""

    def called(x: Tensor, scalars: Tensor) -> tuple[Tensor, Tensor]:
        x, scalars = network(x.movedim(-1, 0), scalars)
        return x.movedim(0, -1), scalars

    return called


def _ways(plain: Function, compiled: Function, cuda: bool) -> dict[str, Function]:
    """What is measured, by the name of the way; as it is has none."""
    if not cuda:
        return {"": plain}
    return {
        "": plain,
        "compiled": compiled,
        "captured": captured(plain),
        "compiled captured": captured(compiled),
    }


def _call(
    mode: str, autocast: bool, target: Tensor, module: nn.Module, network: Network
) -> Function:
    """A forward pass or training step; the network is how the module is called."""

    def forward(x: Tensor, scalars: Tensor) -> Tensor:
        enabled = autocast and x.dtype == DTYPE
        with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            return _row(network(x, scalars)).to(x.dtype)

    if mode == FORWARD:
        return forward
    fused = target.is_cuda
    adam = torch.optim.Adam(module.parameters(), lr=0.0, fused=fused, capturable=fused)

    def step(x: Tensor, scalars: Tensor) -> Tensor:
        adam.zero_grad()
        with torch.enable_grad():
            z = forward(x, scalars)
            (z - target[: len(z)]).square().mean().backward()
        adam.step()
        return _row(p.grad for p in module.parameters() if p.grad is not None)

    return step


class _Parameters(NamedTuple):
    """Of an original network and of ours, which `convert` makes of them by moves and factors."""

    original: nn.Module
    ours: nn.Module
    convert: Convert

    def gradients(self, row: Tensor) -> Tensor:
        """Gradients of our parameters as those of the original's, by the chain rule."""
        named = {n: p.detach().to(row).requires_grad_() for n, p in self._named()}
        with torch.enable_grad():
            found = self.convert(named)
            ours = _row(found[name] for name, _ in self.ours.named_parameters())
        return _row(torch.autograd.grad(ours, [*named.values()], row))

    def share(self) -> None:
        """Give the original our weights."""
        factors = self.convert({n: torch.ones_like(p).double() for n, p in self._named()})
        ours = self.ours.named_parameters()
        weights = self.gradients(_row(p.double() / factors[n].square() for n, p in ours))
        nn.utils.vector_to_parameters(weights.to(DTYPE), self.original.parameters())

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original.named_parameters()


def _row(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])
