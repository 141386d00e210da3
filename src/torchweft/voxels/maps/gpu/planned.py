"""Tiles of tables that are arguments of a record with room: built together at each replay.

The first run in the memory of a record builds tiles as they are asked for, and notes them.  At its
end, memory is allocated for the tiles of tables that share launches.  Later runs, of which one is
recorded, fill it at their beginning: a record could not upload the addresses of its own memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torchweft.core.gpu.launcher import current_device
from torchweft.core.recorded import Run
from torchweft.voxels.maps.gpu.jobs import Job, TilePlan, groups
from torchweft.voxels.maps.gpu.tiles import ASKED, Asked, SearchRemains, empty_rest, fill_rest

__all__ = ["tiles_planned"]

_PLANS = "tile plans"


@contextlib.contextmanager
def tiles_planned(run: Run) -> Iterator[None]:
    """Inside, tiles that an earlier run in this memory asked for are there.

    Args:
        run: of a function that has the tables as arguments.
    """
    notes = run.notes
    if notes is None:  # a call that is not recorded
        yield
        return
    if _PLANS in notes:
        run.value((), _PLANS, lambda: _launch(notes[_PLANS]))
    yield
    if _PLANS not in notes:
        notes[_PLANS] = list(_plans(notes.get(ASKED, [])))
        _launch(notes[_PLANS])  # compiles its kernels, which a record cannot


def _plans(asked: Sequence[Asked]) -> Iterator[TilePlan]:
    """Of tables that share launches; others are left to those who ask."""
    jobs = [Job(*given, SearchRemains()) for given in asked]
    for job in jobs:
        if len(job.table) < job.offsets:
            job.left.rest = empty_rest(job.table, job.offsets)
    for group in groups(jobs):
        if len(group) > 1:
            with current_device(group[0].table):
                yield TilePlan(group)


def _launch(plans: Sequence[TilePlan]) -> None:
    for plan in plans:
        with current_device(plan.jobs[0].table):
            for job in plan.jobs:
                if job.left.rest is not None:
                    fill_rest(job.table, job.order, job.left.rest)
            plan.launch()
            plan.keep()
