"""GATr predicts how bodies move
=============================

GATr is a transformer whose features are multivectors of projective geometric algebra: points,
planes, directions and motions of space (Brehmer et al. 2023). It is equivariant: turn, mirror and
shift the inputs, and the outputs are turned, mirrored and shifted.

Here it learns the motion of bodies that attract each other, from 500 systems. A transformer on
coordinates learns the same task, and both are tested on systems that are turned and shifted.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torchweft import clifford

# %%
# Systems of four bodies: a heavy one at rest and three light ones around it, simulated for
# a time of 1.
torch.manual_seed(0)


def systems(count, bodies=4, steps=200):
    """Masses (S, n, 1), positions and velocities (S, n, 3), and the positions at the end."""
    mass = torch.rand(count, bodies, 1) / 20
    mass[:, 0] = 1
    x = nn.functional.normalize(torch.randn(count, bodies, 3), dim=-1)
    x = x * (0.6 + 0.9 * torch.rand(count, bodies, 1))
    x[:, 0] = 0
    random = torch.randn(count, bodies, 3)
    v = nn.functional.normalize(torch.linalg.cross(x, random), dim=-1)
    v = v / x.norm(dim=-1, keepdim=True).clamp(min=0.1).sqrt()  # on circles around the heavy one
    v[:, 0] = 0
    x_end, v_end = x, v
    for _ in range(steps):
        across = x_end[:, None] - x_end[:, :, None]  # from i to j, (S, i, j, 3)
        pull = across / (across.square().sum(-1, keepdim=True) + 0.01) ** 1.5
        v_end = v_end + (mass[:, None] * pull).sum(2) / steps
        x_end = x_end + v_end / steps
    return mass, x, v, x_end


def moved(mass, x, v, x_end):
    """The systems after a random rotation or reflection, and a shift."""
    turn = torch.linalg.qr(torch.randn(3, 3)).Q
    shift = torch.tensor([0.5, -0.5, 0.5])
    return mass, x @ turn.T + shift, v @ turn.T, x_end @ turn.T + shift


# %%
# GATr reads two multivectors of each body, its position as a point and its velocity as a
# translation, and its mass as a scalar. The multivector that it returns is read as a point.
class Bodies(nn.Module):
    """Positions at the end, (S, n, 3), by GATr."""

    def __init__(self):
        super().__init__()
        self.network = clifford.GATr(2, 1, 8, 1, 0, 16, blocks=2, heads=4)

    def forward(self, mass, x, v):
        """Masses (S, n, 1), positions and velocities (S, n, 3)."""
        point = clifford.embed_point(x.unsqueeze(-2))  # (16, S, n, 1)
        velocity = clifford.embed_translation(v.unsqueeze(-2))
        out, _ = self.network(torch.cat([point, velocity], -1), mass)
        return clifford.extract_point(out).squeeze(-2)


class PlainBodies(nn.Module):
    """The same by a transformer on coordinates."""

    def __init__(self, width=32):
        super().__init__()
        self.first, self.last = nn.Linear(7, width), nn.Linear(width, 3)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, mass, x, v):
        """Masses (S, n, 1), positions and velocities (S, n, 3)."""
        return x + self.last(self.layers(self.first(torch.cat([mass, x, v], -1))))


# %%
# Training on 500 systems; 200 others are held out.
train, test = systems(500), systems(200)


def error(network, data):
    """Root mean square error of a body's position at the end."""
    mass, x, v, x_end = data
    return (network(mass, x, v) - x_end).square().sum(-1).mean().sqrt()


def fit(network, steps=100, batch=50):
    """The error on the held-out systems, every ten steps."""
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    errors = []
    for step in range(steps):
        rows = torch.randint(len(train[0]), (batch,))
        optimizer.zero_grad()
        error(network, [t[rows] for t in train]).backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            with torch.no_grad():
                errors.append(error(network, test).item())
    return errors


networks = {"GATr": Bodies(), "transformer": PlainBodies()}
curves = {name: fit(network) for name, network in networks.items()}
turned = moved(*test)
mass, x, v, x_end = test
rest = (x - x_end).square().sum(-1).mean().sqrt()
print(f"error if the bodies rested: {rest:.3f}")
with torch.no_grad():
    after = {name: [error(n, d).item() for d in (test, turned)] for name, n in networks.items()}
for name, (straight, when_turned) in after.items():
    count = sum(p.numel() for p in networks[name].parameters())
    print(f"{name}, {count} parameters: {straight:.3f} held out, {when_turned:.3f} turned")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
for name, values in curves.items():
    left.plot(range(10, 101, 10), values, label=name)
left.set(title="error on held-out systems", xlabel="step", ylim=(0, None))
left.legend()
for place, values in enumerate(after.values()):
    right.bar([place - 0.2, place + 0.2], values, width=0.35, color=["tab:blue", "tab:orange"])
right.set(title="held-out systems: as drawn, and turned", xticks=[0, 1], xticklabels=list(after))
plt.show()
