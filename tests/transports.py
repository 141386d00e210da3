"""Weighted clouds, and dense transport between them."""

import torch


def distance(x, y):
    """|x_i − y_j|, whose derivative is 0 where it is 0."""
    square = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    away = square > 0
    return torch.where(away, square.where(away, 1).sqrt(), 0)


def softmin(eps, x, y, weights, potential, p):
    scores = (weights.log() + potential / eps).detach().unsqueeze(-2)
    unit = (p * eps) ** (1 / p)
    return -eps * (scores - distance(x / unit, y.detach() / unit) ** p).logsumexp(-1)


def transport(a, x, b, y, lengths, p):
    """f and g at the end; all pairs at every step."""

    def update(length, f, g):
        return softmin(length**p, x, y, b, g, p), softmin(length**p, y, x, a, f, p)

    with torch.no_grad():
        f, g = update(lengths[0], torch.zeros_like(a), torch.zeros_like(b))
        for length in lengths:
            new_f, new_g = update(length, f, g)
            f, g = (f + new_f) / 2, (g + new_g) / 2
    return update(lengths[-1], f, g)


def clouds(batch=(), dim=3, rows=60, columns=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(*batch, rows, dim, generator=g).double()
    y = 0.3 + 0.7 * torch.rand(*batch, columns, dim, generator=g).double()
    a, b = (0.1 + torch.rand(z.shape[:-1], generator=g).double() for z in (x, y))
    return [a / a.sum(-1, keepdim=True), x, b / b.sum(-1, keepdim=True), y]
