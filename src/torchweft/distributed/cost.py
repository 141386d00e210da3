"""What a run over ranks costs: rows and bytes that each sends, and the efficiency to expect.

    time of a rank = s + own · t + Σ over exchanges of (messages · l + max(sent, halo) · b / B)

s, t: seconds of a rank and of a row; b: bytes of a row; l, B: latency and bandwidth of a network.
A step ends with its slowest rank.  It is a prediction: messages wait for each other, and no other
traffic is on the network; what ranks compare before they send (`agree`) is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import si
from torchweft.distributed.halo import Halo

__all__ = [
    "INFINIBAND",
    "NVLINK",
    "Cost",
    "Network",
    "Prediction",
    "Step",
    "Traffic",
    "boxes",
    "explain",
    "predict",
    "ring",
    "traffic",
]


class Network(NamedTuple):
    """How GPUs are connected.

    Args:
        name: of the network.
        bandwidth: bytes that a GPU sends in a second, in one direction.
        latency: seconds of a message.

    Example:
        >>> from torchweft.distributed import cost
        >>> cost.NVLINK
        Network(name='NVLink', bandwidth=450000000000.0, latency=5e-06)
    """

    name: str
    bandwidth: float
    latency: float


NVLINK = Network("NVLink", 450e9, 5e-6)
"""Within a host of H100 or H200: 900 GB/s of both directions, by NVIDIA's data sheets; the latency
is assumed."""

INFINIBAND = Network("InfiniBand", 50e9, 5e-6)
"""Between hosts: NDR, 400 Gb/s and one adapter a GPU, by NVIDIA's data sheets; the latency is
assumed."""


class Traffic(NamedTuple):
    """The rows of a rank in one exchange; gradients go back the same way.

    Args:
        own: rows that it owns.
        halo: rows that it receives.
        sent: rows that it sends; a row that several ranks read counts several times.
        messages: ranks that it receives from.

    Example:
        >>> from torchweft.distributed import cost
        >>> cost.ring(1000, parts=4)
        Traffic(own=250.0, halo=750.0, sent=750.0, messages=3)
    """

    own: float
    halo: float
    sent: float
    messages: int


class Step(NamedTuple):
    """The work and the exchanges of one step of a method.

    Args:
        row_seconds: seconds of the computation of a row.
        row_bytes: bytes of a row in each exchange, those of the gradients too.
        seconds: seconds of a rank, however few its rows: launches.

    Example:
        >>> from torchweft.distributed import cost
        >>> cost.Step(1e-6, (512, 512))
        Step(row_seconds=1e-06, row_bytes=(512, 512), seconds=0.0)
    """

    row_seconds: float
    row_bytes: tuple[float, ...]
    seconds: float = 0.0


class Prediction(NamedTuple):
    """Time and efficiency of one step on one network, from `predict`.

    Args:
        network: the network.
        seconds: of the step.
        weak: time of one rank with a share of the rows and no exchange, over `seconds`.
        strong: time of one rank with all rows, over the number of ranks times `seconds`.

    Example:
        >>> from torchweft.distributed import cost
        >>> step = cost.Step(1e-6, (512,))
        >>> print(cost.predict([cost.Traffic(1000, 0, 0, 0)], step, cost.NVLINK))
        NVLink: 1 ms a step, 100.0% of it computation
    """

    network: Network
    seconds: float
    weak: float
    strong: float

    def __str__(self) -> str:
        return f"{self.network.name}: {si(self.seconds)}s a step, {self.weak:.1%} of it computation"


class Cost(NamedTuple):
    """The cost of a step for a rank, from `explain`; `print` shows it as a report.

    Args:
        traffic: rows of an exchange.
        step: work and exchanges.
        predictions: one for each network.

    Example:
        >>> import torch
        >>> from torchweft.distributed import Halo, cost
        >>> halo = Halo(torch.arange(4096), torch.arange(0))  # one rank
        >>> cost.explain(halo, cost.Step(1e-6, (512, 512))).traffic.own
        4096
    """

    traffic: Traffic
    step: Step
    predictions: tuple[Prediction, ...]

    def __str__(self) -> str:
        own, halo, sent, messages = self.traffic
        moved = sum(self.step.row_bytes)
        share = f" ({halo / own:.1%} of own)" if own else ""
        lines = [
            f"rows: {own:.0f} own, {halo:.0f} of the halo{share}, {sent:.0f} sent",
            f"a step: {len(self.step.row_bytes)} exchanges with {messages} ranks, "
            f"{si(sent * moved)}B sent, {si(halo * moved)}B received",
            *map(str, self.predictions),
        ]
        return "\n".join(lines)


def explain(halo: Halo, step: Step, networks: Sequence[Network] = (NVLINK, INFINIBAND)) -> Cost:
    """What a step with a halo costs this rank, predicted without communication.

    Args:
        halo: the rows of other ranks.
        step: the work on a row, and the bytes of a row in each exchange.
        networks: a prediction is made for each.

    Returns:
        A `Cost`.

    Example:
        >>> import torch
        >>> from torchweft.distributed import Halo, cost
        >>> halo = Halo(torch.arange(4096), torch.arange(0))  # one rank
        >>> print(cost.explain(halo, cost.Step(1e-6, (512, 512)), [cost.NVLINK]))
        rows: 4096 own, 0 of the halo (0.0% of own), 0 sent
        a step: 2 exchanges with 0 ranks, 0 B sent, 0 B received
        NVLink: 4.1 ms a step, 100.0% of it computation
    """
    messages = sum(count > 0 for count in halo.receive)
    found = Traffic(halo.num_rows, halo.num_halo, len(halo.send_rows), messages)
    return Cost(found, step, tuple(predict([found], step, network) for network in networks))


def predict(
    ranks: Sequence[Traffic], step: Step, network: Network, overlapped: bool = False
) -> Prediction:
    """Time and efficiency of a step over ranks.

    Args:
        ranks: the traffic of each rank, of `traffic`, `boxes` or `ring`; one serves for equal
            ranks.
        step: work and exchanges.
        network: that connects all ranks.
        overlapped: whether rows are sent while others are computed with, as in a ring and between
            `halo.begin` and `halo.finish`; the longer of both then counts.

    Returns:
        A `Prediction`.

    Example:
        >>> from torchweft.distributed import cost
        >>> step = cost.Step(1e-6, (512,))
        >>> print(cost.predict([cost.Traffic(1000, 0, 0, 0)], step, cost.NVLINK))
        NVLink: 1 ms a step, 100.0% of it computation
    """
    own = sum(rank.own for rank in ranks)
    slowest = max(_seconds(rank, step, network, overlapped) for rank in ranks)
    alone, share = (step.seconds + rows * step.row_seconds for rows in (own, own / len(ranks)))
    if not slowest:
        return Prediction(network, 0.0, 1.0, 1.0)
    return Prediction(network, slowest, share / slowest, alone / (len(ranks) * slowest))


def traffic(owner: Tensor, src: Tensor, dst: Tensor, parts: int) -> list[Traffic]:
    """Traffic of each part of a graph whose edges are summed by the owner of dst.

    Args:
        owner: (N,) integers, the part that owns each row, such as of `Domains(…, parts=512).owner`.
        src: (E,) integers, the row that each edge reads.
        dst: (E,) integers, the row that it adds to.
        parts: number of parts.

    Returns:
        A list with the `Traffic` of each part.

    Cost: a pass over the edges in one process, and a sort of those between parts.

    Example:
        >>> import torch
        >>> from torchweft.distributed import cost
        >>> owner, row = torch.tensor([0, 0, 1, 1]), torch.arange(4)
        >>> cost.traffic(owner, row, row.roll(1), 2)[0]  # a circle
        Traffic(own=2, halo=1, sent=1, messages=1)
    """
    reader = owner[dst]
    across = (owner[src] != reader).nonzero().flatten()
    read = torch.unique(reader[across] * len(owner) + src[across])
    reader, row = read // len(owner), read % len(owner)
    sender = owner[row]
    links = torch.unique(reader * parts + sender) // parts
    counts = (t.bincount(minlength=parts).tolist() for t in (owner, reader, sender, links))
    return [Traffic(*numbers) for numbers in zip(*counts, strict=True)]


def boxes(own: float, density: float, reach: float, dim: int = 3) -> Traffic:
    """Traffic of a box of space among boxes like it: an upper bound for isotropic cutoffs.

        halo = density · ((a + 2 reach)^dim − a^dim)      own = density · a^dim

    Args:
        own: number of rows in the box.
        density: rows in a unit of space; for a surface, in a unit of area.
        reach: how far rows read.
        dim: 3 for space that is filled, 2 for surfaces.

    Returns:
        The `Traffic` of each rank.

    Example:
        >>> from torchweft.distributed import cost
        >>> round(cost.boxes(own=1000, density=1.0, reach=1.0).halo)
        728
    """
    side = (own / density) ** (1 / dim)
    around = 2 * math.ceil(reach / side) + 1
    halo = density * ((side + 2 * reach) ** dim - side**dim)
    return Traffic(own, halo, halo, around**dim - 1)


def ring(rows: float, parts: int) -> Traffic:
    """Traffic of a reduction over all pairs of rows, passed round a ring of parts.

    Args:
        rows: number of rows of all parts.
        parts: number of parts.

    Returns:
        The `Traffic` of each rank.

    Example:
        >>> from torchweft.distributed import cost
        >>> cost.ring(1000, parts=4)
        Traffic(own=250.0, halo=750.0, sent=750.0, messages=3)
    """
    others = rows - rows / parts
    return Traffic(rows / parts, others, others, parts - 1)


def _seconds(rank: Traffic, step: Step, network: Network, overlapped: bool) -> float:
    busy = step.seconds + rank.own * step.row_seconds
    moved = max(rank.sent, rank.halo) * sum(step.row_bytes) / network.bandwidth
    exchanged = len(step.row_bytes) * rank.messages * network.latency + moved
    return max(busy, exchanged) if overlapped else busy + exchanged
