"""`make check`'s receipt counts every check and names every one that fails.

Seen red with: failures swallowed, a mode left out of the suite.
"""

import json
from dataclasses import replace

import torch

from tests.cases import Suite, products, receipt

CASE = products.door_cases()[0]
WRONG = replace(CASE, name="wrong: scaled", call=lambda *a, **k: 1.01 * CASE.call(*a, **k))


def no_door(case, device):
    raise RuntimeError("no\nsuch door")


def test_a_red_check_is_named_and_the_others_go_on(monkeypatch):
    suite = Suite([CASE, WRONG], [CASE], [], [CASE], ())
    monkeypatch.setattr(receipt, "suites", lambda: {"products": suite, "o3": suite})
    monkeypatch.setattr(receipt, "_all_checks", receipt._all_checks.__wrapped__)  # not remembered
    monkeypatch.setattr(receipt, "DOOR_CHECKS", (no_door,))
    made = receipt.check_all(torch.device("cpu"), {"gpu": "none"}, "o3")
    backends, dtypes, body_checks = 2, 4, 4
    assert made.checks == backends * (2 * dtypes + body_checks) + 1
    assert len(made.failures) == backends * dtypes + 1
    assert made.failures[0].startswith("check_values of wrong: scaled, numba float64: Assertion")
    assert made.failures[-1].endswith(": RuntimeError: no")
    read = json.loads(made.json())
    assert read["machine"] == {"gpu": "none"}
    assert set(read["worst"]["mul: door"]) == {"float64", "float32", "bfloat16", "float16"}
    assert all(0 < ratio <= 1 for ratio in read["worst"]["mul: door"].values())
    assert "9 failed" in str(made)


def test_every_mode_of_every_op_is_registered():
    names = {case.name.split(",")[0] for case in products.suite().cases}
    for op in products.OPS:
        for mode in products.MODES:
            assert any(name.startswith(f"{op}: {mode}") for name in names)
        channels = {case.name.split("C=")[1] for case in products.op_cases(op)}
        assert {"1", "3", "8", "16", "31", "64", "65", "128"} <= channels
