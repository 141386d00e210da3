"""A program for torchrun whose rank 1 raises."""

import time

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

from torchweft.distributed import Halo, propagate_errors


class OutOfAtomsError(Exception):
    pass


def fail():
    raise OutOfAtomsError("no atoms are left")


def before(rank, size):
    """Rank 0 computes on and does not look, rank 2 waits."""
    if rank == 1:
        fail()
    if rank == 0:
        time.sleep(600)
    distributed.all_reduce(torch.ones(1))


def in_a_halo(rank, size):
    """The others are in the halo's backward pass, which sends gradients to rank 1."""
    halo = Halo(torch.tensor([rank]), torch.tensor([r for r in range(size) if r != rank]))
    x = torch.ones(1, 2, requires_grad=True)
    y = halo(x)
    if rank == 1:
        y.register_hook(lambda grad: fail())
    y.sum().backward()


def in_a_ring(rank, size):
    """Blocks go round; rank 1 lets the others wait for its second."""
    block, arrived = torch.ones(3), torch.empty(3)
    for step in range(size - 1):
        if step == 1 and rank == 1:
            fail()
        works = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, block, (rank + 1) % size),
                distributed.P2POp(distributed.irecv, arrived, (rank - 1) % size),
            ]
        )
        for work in works:
            work.wait()


def fails(rank, size, where):
    with propagate_errors():
        where(rank, size)
    print(f"rank {rank} has a result")


@record
def main():
    distributed.init_process_group("gloo")
    fails(distributed.get_rank(), distributed.get_world_size(), before)


if __name__ == "__main__":
    main()
