"""Runs of the benchmark beside each other: who measures a case, and when.

Seen red with: every case taken by every run; a lock that timing shares; a case checked out of turn;
checks that begin while a run waits to time.
"""

import contextlib
import fcntl

import pytest

from benchmarks.harness import run
from benchmarks.harness.record import append, read
from benchmarks.harness.turns import ALONE, Beside
from tests.benches import CPU, DOT, Peer, measured

FLOCK = fcntl.flock


def test_a_case_is_measured_by_one_run(tmp_path):
    first, second = Beside(tmp_path), Beside(tmp_path)
    taken = [(turns.takes("o3 W1 mace/L2"), turns.takes("o3 W2")) for turns in (first, second)]
    assert taken == [(True, True), (False, False)]
    assert ALONE.takes("o3 W2")
    assert ALONE.takes("o3 W2")


@contextlib.contextmanager
def _nowait(monkeypatch):
    """Locks that raise where they would wait."""
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda file, kind: FLOCK(file, kind | fcntl.LOCK_NB))
        yield


def test_checks_share_and_timing_does_not(tmp_path, monkeypatch):
    first, second = Beside(tmp_path / "new"), Beside(tmp_path / "new")
    with _nowait(monkeypatch):
        with first.checking(), second.checking():
            pass
        for holds, waits in (("timing", "timing"), ("timing", "checking"), ("checking", "timing")):
            with getattr(first, holds)(), pytest.raises(BlockingIOError):
                getattr(second, waits)().__enter__()
        with second.timing():
            pass


def test_a_check_does_not_begin_where_a_run_waits_to_time(tmp_path, monkeypatch):
    runs = [Beside(tmp_path) for _ in range(3)]
    waiting = []

    def checks_while_another_waits(file, kind):
        if kind == fcntl.LOCK_EX and file.name.endswith("machine.lock"):
            waiting.append(file)
            with _nowait(monkeypatch), pytest.raises(BlockingIOError):
                runs[2].checking().__enter__()
        FLOCK(file, kind | fcntl.LOCK_NB)

    with runs[0].checking(), monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", checks_while_another_waits)
        with pytest.raises(BlockingIOError):
            runs[1].timing().__enter__()
    assert waiting


def test_everything_is_checked_before_anything_is_timed(monkeypatch):
    done = []

    class Noted:
        takes = ALONE.takes

        def checking(self):
            done.append("checking")
            return contextlib.nullcontext()

        def timing(self):
            done.append("timing")
            return contextlib.nullcontext()

    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)
    rows = list(run("test", [DOT], [Peer()], CPU, print, Noted()))
    assert len(rows[0]) == 2 * len(DOT.phases)
    assert done == ["checking", "timing"]


def test_rows_of_one_case_are_written_in_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)
    rows, _ = measured([Peer()])
    path = tmp_path / "new" / "rows.jsonl"
    append(path, rows)
    append(path, rows[:1])
    assert [row.key for row in read(path)] == [row.key for row in rows]
    assert len(path.read_text().splitlines()) == len(rows) + 1
