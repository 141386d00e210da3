r"""clifford: where charged bodies will be
======================================

Five charged bodies attract and repel each other. From their positions and velocities now, a
network predicts the positions one unit of time later. If the system is turned, mirrored or moved,
the prediction must follow: layers on *multivectors* do this by construction. We look at
multivectors first, then train a small network with the layers of CEGNN (Ruhe, Brandstetter and
Forré, 2023, arXiv:2305.11141). Ten minutes to read.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from torchweft import clifford

torch.manual_seed(0)
plt.rcParams.update({"figure.figsize": (5, 3.8), "font.size": 12})

# %%
# Multivectors
# ------------
# The algebra Cl(3,0) of space has three vectors e1, e2, e3. A multivector has eight numbers: a
# scalar, a vector (e1, e2, e3), a bivector (e12, e13, e23), which is an oriented plane, and a
# trivector (e123), an oriented volume.
space = clifford.Algebra((1, 1, 1))
print("grades of the eight numbers:", space.grades)

# %%
# Tensors are (8, rows, features): the eight numbers stand first. The geometric product of two
# vectors is their inner product, a scalar, and their wedge product, a bivector:
a = clifford.embed_vector(torch.tensor([[[1.0, 2.0, 0.0]]]), space)  # one row, one feature
b = clifford.embed_vector(torch.tensor([[[3.0, 1.0, 0.0]]]), space)
print(clifford.geometric_product(a, b, space).flatten().tolist())

# %%
# A layer with this product in it is *equivariant*: turn its input, and the output turns. A turn by
# the angle θ in the plane e12 is the sandwich r x r̃ with a rotor r, the exponential of −θ/2 e12:
half = torch.zeros(8, 1, 1)
half[4] = -torch.pi / 4  # θ is a right angle
rotor = clifford.exp(half, space)
turned = clifford.sandwich(rotor, a, space)
print([round(x, 3) for x in clifford.extract_vector(turned, space).flatten().tolist()])

# %%
# Data
# ----
# Bodies with charges of +1 and −1 start at random. Forces fall off with the square of the distance,
# and a force component is cut at 100. This is the n-body comparison of Satorras, Hoogeboom and
# Welling (2021, arXiv:2102.09844), with fewer systems.
BODIES = 5


def forces(charge, position):
    """The force on each body, (systems, bodies, 3)."""
    apart = position[:, :, None] - position[:, None]
    distance = apart.norm(dim=-1, keepdim=True) + torch.eye(BODIES)[:, :, None]
    product = (charge[:, :, None] * charge[:, None])[..., None]
    return (product * apart / distance**3).sum(2).clamp(-100, 100)


def simulate(systems, step=0.002):
    """Charges, then positions and velocities at time 3, and positions at time 4."""
    charge = torch.randint(2, (systems, BODIES)).double() * 2 - 1
    position = torch.randn(systems, BODIES, 3, dtype=torch.float64)
    velocity = nn.functional.normalize(torch.randn_like(position), dim=-1) / 2
    frames = []
    for time in range(round(4 / step)):
        if time == round(3 / step):
            frames = [position, velocity]
        velocity = velocity + step * forces(charge, position)
        position = position + step * velocity
    return [x.float() for x in (charge, *frames, position)]


train, choosing, held_out = (simulate(systems) for systems in (2000, 200, 500))
print(f"{len(train[0])} systems to train on, {len(held_out[0])} held out")

# %%
# A network
# ---------
# A body is three multivectors: its charge, a scalar; its position relative to the middle of the
# system, and its velocity, vectors. Messages go between every two bodies of a system, and know the
# product of the two charges. `EGCL` computes a message from the difference of two bodies and adds
# the mean of the messages to each, with weighted geometric products inside. `MultivectorLinear`
# mixes the features of a grade. `message_plan` sorts the edges once.


def complete(systems):
    """Edges between every two bodies of each system."""
    first, second = (~torch.eye(BODIES, dtype=torch.bool)).nonzero().T
    begin = BODIES * torch.arange(systems)[:, None]
    src, dst = (begin + second).flatten(), (begin + first).flatten()
    return clifford.message_plan(src, dst, BODIES * systems)


class Bodies(nn.Module):
    """Positions one unit of time later, (systems, bodies, 3)."""

    def __init__(self, features=16, layers=3):
        super().__init__()
        self.into = clifford.MultivectorLinear(3, features, space)
        self.layers = nn.ModuleList(
            clifford.EGCL(features, space, edge_features=1) for _ in range(layers)
        )
        self.out = clifford.MultivectorLinear(features, 1, space)

    def forward(self, charge, position, velocity):
        edges = complete(len(charge))
        middle = position.mean(1, keepdim=True)
        parts = [
            clifford.embed_scalar(charge.view(-1, 1, 1), space),
            clifford.embed_vector((position - middle).view(-1, 1, 3), space),
            clifford.embed_vector(velocity.reshape(-1, 1, 3), space),
        ]
        x = self.into(torch.cat(parts, 2))  # (8, bodies, features)
        both = charge.flatten()[edges.src] * charge.flatten()[edges.dst]
        messages = clifford.embed_scalar(both.view(-1, 1, 1), space)
        for layer in self.layers:
            x = layer(x, edges, messages)
        change = clifford.extract_vector(self.out(x), space)
        return position + change.view(position.shape)


# %%
# Before any training the prediction turns with the system: turn or mirror all positions and
# velocities by an orthogonal matrix, and compare.
model = Bodies()
charge, position, velocity, _ = held_out
turn = torch.linalg.qr(torch.randn(3, 3)).Q
with torch.no_grad():
    before = model(charge, position, velocity) @ turn
    after = model(charge, position @ turn, velocity @ turn)
print(f"largest difference {(after - before).abs().max():.1e} of {before.abs().max():.1f}")

# %%
# Training
# --------
# Adam on the squared error. The state that is best on the systems for choosing is kept; the
# held-out systems are used once, below.
STEPS, SIZE = 300, 100
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, STEPS)


def error(predicted, data):
    """Root of the mean squared error of a coordinate."""
    return (predicted - data[-1]).square().mean().sqrt().item()


curve, best = [], {}
for step in range(STEPS):
    rows = torch.randint(len(train[0]), (SIZE,))
    *known, target = (x[rows] for x in train)
    loss = (model(*known) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        with torch.no_grad():
            curve.append((step + 1, error(model(*choosing[:-1]), choosing)))
        if curve[-1][1] == min(value for _, value in curve):
            best = {name: value.clone() for name, value in model.state_dict().items()}

# %%
# How good is it?
# ---------------
# The error of a coordinate on the held-out systems, beside two guesses: bodies that stay where they
# are, and bodies that go straight on.
model.load_state_dict(best)
with torch.no_grad():
    predicted = model(*held_out[:-1])
guesses = {"stays": position, "straight on": position + velocity, "network": predicted}
for name, guess in guesses.items():
    print(f"{name:12s} {error(guess, held_out):.3f}")

figure, axis = plt.subplots()
axis.plot(*zip(*curve, strict=True), "o-", markersize=3, label="network, choosing")
for name, colour in (("stays", "silver"), ("straight on", "grey")):
    axis.axhline(error(guesses[name], held_out), color=colour, linestyle="dashed", label=name)
axis.set(xlabel="step", ylabel="error of a coordinate", ylim=(0, None))
axis.legend()
figure.tight_layout()

# %%
# One system from above: where the bodies are, where they will be, and the prediction. Squares are
# positive, circles negative.
shown = int((charge.sum(1).abs() == 1).nonzero()[0])  # charges of both signs
figure, axis = plt.subplots(figsize=(5, 4.6))
for body in range(BODIES):
    marker = "s" if charge[shown, body] > 0 else "o"
    places = [x[shown, body, :2] for x in (position, held_out[-1], predicted)]
    colours = ("silver", "black", "C1")
    for place, colour, label in zip(places, colours, ("now", "later", "predicted"), strict=True):
        shown_once = label if body == 0 else None
        axis.scatter(*place, s=60, color=colour, marker=marker, label=shown_once)
    axis.plot(*torch.stack(places[:2]).T, color="silver", zorder=0)
axis.set_aspect("equal")
axis.legend()
figure.tight_layout()
plt.show()
