"""What a call sends to other ranks, and where the host waits for a GPU, in the order of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

NAMES = {
    "c10d::allreduce_": "sum",
    "c10d::alltoall_base_": "exchange",
    "c10d::allgather_": "gather",
    "aten::_local_scalar_dense": "read",
    "tolist": "read",
    "aten::equal": "compare",
    "aten::nonzero": "rows",
    "aten::_unique2": "rows",
}
"""Operators of torch that send, or whose result a host needs."""


def steps(call: Callable[[], object]) -> list[str]:
    """Values of NAMES, of a call on this thread and on those of autograd."""
    tolist = Tensor.tolist

    def named(tensor: Tensor) -> Any:
        with record_function("tolist"):
            return tolist(tensor)

    of_cpu = profile(activities=[ProfilerActivity.CPU], acc_events=True)
    with patch.object(Tensor, "tolist", named), of_cpu as seen:
        call()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [NAMES[event.name] for event in events if event.name in NAMES]
