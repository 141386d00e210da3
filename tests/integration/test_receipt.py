"""`make check`'s receipt counts every check and names every one that fails.

Seen red with: failures swallowed, a mode left out of the suite.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import check
from tests.cases import Suite, products, receipt
from tests.cases.receipt_of_ranks import check_ranks

CASE = products.door_cases()[0]
WRONG = replace(CASE, name="wrong: scaled", call=lambda *a, **k: 1.01 * CASE.call(*a, **k))


CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def few(monkeypatch):
    """Two families of two cases and a door."""
    suite = Suite([CASE, WRONG], [CASE], [], [CASE], ())
    monkeypatch.setattr(receipt, "suites", lambda: {"products": suite, "o3": suite})
    monkeypatch.setattr(receipt, "_all_checks", receipt._all_checks.__wrapped__)  # not remembered
    monkeypatch.setattr(receipt, "DOOR_CHECKS", (no_door,))


def no_door(case, device):
    raise RuntimeError("no\nsuch door")


def test_a_red_check_is_named_and_the_others_go_on(monkeypatch):
    few(monkeypatch)
    *_, made = receipt.check_family("o3", CPU, {"gpu": "none"})
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
    assert made.missing == []


def test_a_receipt_is_written_as_it_goes_and_taken_up(monkeypatch, tmp_path):
    """Red before: a receipt at the end alone, so that a check that ran out of time left nothing."""
    few(monkeypatch)
    monkeypatch.setattr(receipt, "BLOCK", 4)
    path = tmp_path / "receipt_o3.json"
    for made in receipt.check_family("o3", CPU, {"gpu": "none", "date": "today"}):
        path.write_text(made.json())
        if made.checks == 8:
            break
    begun = receipt.read(path, {"gpu": "none", "date": "tomorrow"})
    assert begun.checks == 8
    assert begun.missing == [f"block {n}" for n in range(2, 7)]
    *_, whole = receipt.check_family("o3", CPU, {"gpu": "none"})
    *_, resumed = receipt.check_family("o3", CPU, {"gpu": "none"}, begun)
    assert (resumed.checks, resumed.failures) == (whole.checks, whole.failures)
    assert (resumed.worst, resumed.missing) == (whole.worst, [])
    assert receipt.read(path, {"gpu": "another"}) is None
    assert receipt.read(tmp_path / "none.json", {}) is None


def test_no_block_begins_after_the_end(monkeypatch):
    few(monkeypatch)
    *_, made = receipt.check_family("o3", CPU, {}, seconds=0.0)
    assert made.checks == 0
    assert "blocks are missing" in str(made)


def test_families_are_checked_in_turn_and_failures_told_at_once(monkeypatch, tmp_path, capsys):
    """Red before: one receipt of all, and failures at the end."""
    few(monkeypatch)
    monkeypatch.setattr(check, "FAMILIES", ("products", "o3"))
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert check.main(words) == 1
    said = capsys.readouterr()
    assert said.err.count("check_values of wrong: scaled, numba float64: Assertion") == 2
    assert "products: 25 checks, 9 failed" in said.out
    assert check.main([*words, "--resume"]) == 1  # nothing is left to run
    assert "wrong: scaled" not in capsys.readouterr().err
    for family in ("products", "o3"):
        made = json.loads((tmp_path / "cpu" / f"receipt_{family}.json").read_text())
        assert (made["checks"], made["missing"]) == (25, [])


def test_every_mode_of_every_op_is_registered():
    names = {case.name.split(",")[0] for case in products.suite().cases}
    for op in products.OPS:
        for mode in products.MODES:
            assert any(name.startswith(f"{op}: {mode}") for name in names)
        channels = {case.name.split("C=")[1] for case in products.op_cases(op)}
        assert {"1", "3", "8", "16", "31", "64", "65", "128"} <= channels


PROGRAM = """
import os, pytest, time
def test_kept(): assert os.environ["TORCHWEFT_TEST_RANKS"] == "cuda"
def test_broken(): assert 1 == 2
@pytest.fixture
def torn():
    yield
    assert 3 == 4
def test_torn(torn): pass
def test_of_many(): pytest.skip("needs 4")
@pytest.mark.skipif(os.environ["INSTALLED"] == "no", reason="needs a package")
def test_of_a_package(): pass
def test_long(): time.sleep(float(os.environ["SECONDS_OF_A_TEST"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_receipt_of_ranks_names_what_failed_and_what_is_missing(tmp_path, monkeypatch, workers):
    """Red before: a receipt at the end alone, so that a run that was ended left nothing.

    And seen red with skipped tests among the checks, a test that is torn down wrongly counted
    twice, a run that takes all tests up again, a run in a worker of pytest-xdist that wrote
    nothing, and tests of a package that is not installed among the missing.
    """
    (tmp_path / "test_three.py").write_text(PROGRAM)
    monkeypatch.setenv("SECONDS_OF_A_TEST", "60")
    monkeypatch.setenv("INSTALLED", "no")
    given = [str(tmp_path / "test_three.py"), f"--rootdir={tmp_path}", "-n", str(workers)]
    *_, none = check_ranks("cuda", {"gpu": "none"}, None, 0.0, *given)
    assert none.checks == 0
    receipts = check_ranks("cuda", {"gpu": "none"}, None, None, *given)
    made = next(
        made for made in receipts if made.checks == 3 and made.failures[1:] and made.left_out
    )
    receipts.close()
    names = [f"test_three.py::{name}" for name in ("test_of_many", "test_long")]
    assert (made.checks, made.missing) == (3, names)
    assert made.left_out == {"test_three.py::test_of_a_package": "needs a package"}
    assert "; 2 blocks are missing; 1 left out: needs a package\n" in str(made)
    broken, torn = sorted(made.failures)
    assert broken.startswith("test_three.py::test_broken: assert 1 == 2")
    assert torn.startswith("test_three.py::test_torn: assert 3 == 4")
    monkeypatch.setenv("SECONDS_OF_A_TEST", "0")
    monkeypatch.setenv("INSTALLED", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    *_, whole = check_ranks("cuda", {"gpu": "none"}, made)
    assert (whole.checks, whole.missing, whole.left_out) == (5, names[:1], {})
    assert whole.failures == made.failures
    whole.missing.clear()
    assert list(check_ranks("cuda", {"gpu": "none"}, whole)) == [whole]  # nothing is run
