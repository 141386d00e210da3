"""`python -m benchmarks.transport_accuracy`: how far SamplesLoss is from converged transport.

Prints the table of docs/families/reductions.md, in Markdown.  Errors are relative, the largest of
some draws: of the loss |L − L*| / L*, and of its gradient in x |∇L − ∇L*| / |∇L*|, where L* is
the maximum of the dual, found by Newton's method.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torchweft.reductions import SamplesLoss

__all__ = ["main"]

BLUR, SCALINGS, DRAWS = 0.05, (0.5, 0.7, 0.9, 0.99), 3
CASES: dict[str, dict[str, Any]] = {
    "p = 2": {"p": 2},
    "p = 1": {"p": 1},
    "p = 2, reach 0.3": {"p": 2, "reach": 0.3},
}


def clouds(seed: int) -> tuple[Tensor, Tensor]:
    """100 points uniform in the unit cube, and 80 in a smaller one in its corner."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(100, 3, generator=generator, dtype=torch.float64)
    return x, 0.3 + 0.7 * torch.rand(80, 3, generator=generator, dtype=torch.float64)


def converged(x: Tensor, y: Tensor, p: int, reach: float | None = None) -> Tensor:
    """Potentials at x, as a function of x with the sources held, by Newton's method.

    The plan's marginals are the weights, or these times exp(−f / ρ).
    """
    eps, rho = BLUR**p, torch.inf if reach is None else reach**p
    near = SamplesLoss(p=p, blur=BLUR, reach=reach, scaling=0.97, debias=False, potentials=True)
    cost = torch.cdist(x.detach(), y) ** p / p
    count = torch.tensor([1 / n for n in cost.shape for _ in range(n)], dtype=x.dtype)
    free = torch.tensor([[1.0] * len(x) + [-1.0] * len(y)], dtype=x.dtype)  # f + 1 and g − 1
    both, residual = torch.cat(near(x.detach(), y)), count
    while residual.abs().max() > 1e-14:
        f, g = both.split(cost.shape)
        plan = ((f[:, None] + g - cost) / eps).exp() / cost.numel()
        marginals, kept = torch.cat([plan.sum(1), plan.sum(0)]), count * (-both / rho).exp()
        hessian = (marginals / eps + kept / rho).diag()
        hessian[: len(x), len(x) :], hessian[len(x) :, : len(x)] = plan / eps, plan.T / eps
        residual = kept - marginals
        step = torch.linalg.solve(hessian + free.T @ free * count.min(), residual)
        both = both + step * (eps / step.abs().max()).clamp(max=1)
    scores = (both[len(x) :] - torch.cdist(x, y) ** p / p) / eps - math.log(len(y))
    return -eps / (1 + eps / rho) * scores.logsumexp(1)


def exact(x: Tensor, y: Tensor, p: int, reach: float | None = None) -> list[Tensor]:
    """The debiased loss, and its gradient in x."""
    x = x.detach().requires_grad_()
    pairs = [(x, y), (y, x.detach()), (x, x.detach()), (y, y)]
    f, g, own_x, own_y = (converged(*pair, p=p, reach=reach) for pair in pairs)
    if reach is None:
        loss = (f - own_x).mean() + (g - own_y).mean()
        return [loss.detach(), *torch.autograd.grad(loss, x)]
    rho, eps = reach**p, BLUR**p
    kept = [(-potential / rho).exp().mean() for potential in (f, g, own_x, own_y)]
    loss = kept[2] + kept[3] - kept[0] - kept[1]
    (gradient,) = torch.autograd.grad((rho + eps) * loss, x)
    return [((rho + eps / 2) * loss).detach(), gradient]


@functools.cache
def errors(case: str, scaling: float) -> tuple[float, float]:
    """Relative errors of the loss and of its gradient, the largest of the draws."""
    found = []
    for seed in range(DRAWS):
        x, y = clouds(seed)
        true = references(case, seed)
        x.requires_grad_()
        loss = SamplesLoss(**CASES[case], blur=BLUR, scaling=scaling)(x, y)
        ours = [loss.detach(), *torch.autograd.grad(loss, x)]
        found.append([float((a - b).norm() / b.norm()) for a, b in zip(ours, true, strict=True)])
    of_loss, of_gradient = torch.tensor(found).amax(0).tolist()
    return of_loss, of_gradient


@functools.cache
def references(case: str, seed: int) -> list[Tensor]:
    """`exact` of a draw."""
    return exact(*clouds(seed), **CASES[case])


def steps(scaling: float) -> int:
    """Updates of the potentials, of clouds 1.7 across."""
    from torchweft.reductions.transport.settings import Settings

    return len(Settings(blur=BLUR, scaling=scaling).lengths(3**0.5)) + 2


def main() -> None:
    """Print the table."""
    print("| scaling | steps |", " | ".join(f"{case}: loss | gradient" for case in CASES), "|")
    print("|---" * (2 + 2 * len(CASES)) + "|")
    for scaling in SCALINGS:
        cells = [f"{e:.1e}" for case in CASES for e in errors(case, scaling)]
        print(f"| {scaling} | {steps(scaling)} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
