"""Pairwise covering keeps every pair of values, and few items.

Seen red with: pairs of neighbouring parameters alone, items dropped as soon as their values were
seen.
"""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.covering import covering, requirements
from torchweft.testing.contract import Setting

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=4)


def pairs(items):
    return {
        (a, item[a], b, item[b])
        for item in items
        for a, b in itertools.combinations(range(len(item)), 2)
    }


@given(sizes=SIZES, data=st.data())
def test_every_pair_that_occurs_is_kept(sizes, data):
    product = list(itertools.product(*map(range, sizes)))
    items = data.draw(st.lists(st.sampled_from(product), min_size=1, unique=True))
    kept = [items[place] for place in covering([pairs([item]) for item in items])]
    assert pairs(kept) == pairs(items)


@given(sizes=SIZES)
def test_few_of_a_product_are_kept(sizes):
    """No more than the two largest parameters need, and some for the greedy choice."""
    product = list(itertools.product(*map(range, sizes)))
    *_, second, first = sorted(sizes)
    assert (
        first * second <= len(covering([pairs([item]) for item in product])) <= 2 * first * second
    )


def test_one_parameter_keeps_all():
    assert covering([requirements({"a": value}) for value in "abc"]) == [0, 1, 2]
    assert covering([]) == []


def test_fields_of_a_setting_are_features():
    """Each of 16 settings is kept, and each layout with each dtype, backend and order."""
    settings = [Setting(dtype=d, backend=b, order=o) for d in "abcd" for b in "xy" for o in (1, 2)]
    assert len(covering([requirements({"setting": setting}) for setting in settings])) == 16
    items = [{"setting": s, "layout": layout} for s in settings for layout in "uvw"]
    assert len(covering([requirements(item) for item in items])) <= 20
