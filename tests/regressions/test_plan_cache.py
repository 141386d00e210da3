"""Plans of calls without tables have no tensor to die with: their number is bounded.

Seen red with: no bound, as before (5000 sizes, 5000 plans kept).
"""

import torch

from torchweft.core import tables as cache


def test_entries_without_tensors_do_not_pile_up():
    kept = cache.TensorCache()
    for size in range(cache.MOST_VALUES + 100):
        kept.get((None,), size, object)
    assert len(kept._entries) <= cache.MOST_VALUES


def test_the_newest_entries_are_kept():
    kept = cache.TensorCache()
    table = torch.arange(3)
    for size in range(cache.MOST_VALUES):
        kept.get((None,), size, object)
    value = kept.get((table,), "plan", object)
    assert kept.get((table,), "plan", object) is value
