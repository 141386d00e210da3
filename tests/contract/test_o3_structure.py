"""Structures and calls: their texts, their identity, derivatives of calls.

Seen red with: structures compared by their widths, the first term of a result alone differentiated.
"""

import pytest

from tests.cases.channelwise import STRUCTURES
from torchweft.o3.channelwise.calls import (
    Call,
    Result,
    forward,
    gradient,
    read_call,
    tangent,
    trimmed,
)
from torchweft.o3.channelwise.structure import read


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_text_gives_the_same_structure(name):
    structure = STRUCTURES[name]
    again = read(str(structure))
    assert again == structure
    assert hash(again) == hash(structure)
    assert again.products == structure.products
    assert again.weighted == ("unweighted" not in name)


def test_structures_differ_by_what_they_hold():
    structure = STRUCTURES["uvu"]
    (product,) = structure.products
    (path, *others) = product.paths
    paths = (path._replace(factor=2.0), *others)
    text = str(structure).replace(
        str(list(path)).replace(" ", ""), str(list(paths[0])).replace(" ", "")
    )
    assert read(text).products[0].paths == paths
    assert read(text) != structure
    assert repr(structure) == "Structure(5 paths, widths (20, 4, 61, 25))"


def test_calls_are_written_and_read():
    call = forward(weighted=True)
    assert str(call) == "xyw|z:0,1,2"
    assert str(gradient(call, [True] * 3, [True])) == "xywz|x:1,3,2 y:0,3,2 w:0,1,3"
    assert str(forward(weighted=False)) == "xy|z:0,1"
    for text in ("xywz|x:1,3,2 y:0,3,2", "xyxy|z:2,1+0,3", "xy|z:"):
        assert str(read_call(text)) == text


def test_a_tangent_moves_one_factor_at_a_time():
    assert str(tangent(forward(weighted=True), [True, False, True])) == "xywxw|z:3,1,2+0,1,4"
    sums = read_call("xyxy|z:2,1+0,3")
    assert str(tangent(sums, [False, True, True, False])) == "xyxyyx|z:5,1+2,4"


def test_the_gradient_of_a_sum_has_all_its_terms():
    sums = read_call("xyxy|z:2,1+0,3")
    found = gradient(sums, [True, True, False, True], [True])
    assert str(found) == "xyxyz|x:3,4 y:2,4 y:0,4"
    both = read_call("xyz|x:1,2 y:0,2")
    assert str(gradient(both, [True] * 3, [True, True])) == "xyzxy|x:4,2 y:3,2 z:3,1+0,4"


def test_trimmed_calls_name_every_tensor():
    call = Call("xywz", (Result("x", ((1, 3, 2),)), Result("z", ())))
    found, used = trimmed(call)
    assert used == (1, 2, 3)
    assert str(found) == "ywz|x:0,2,1 z:"
