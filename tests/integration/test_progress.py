"""Progress: a log has lines of long jobs alone, a terminal without rich has one line.

Seen red with: a line for each item, a line for each after the first, no line at all, none before
ten seconds; a step that is named when it is over, and one that is named at once.
"""

import importlib.util
import sys
import time

import pytest

from torchweft import progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass where the test says so."""
    passed = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: passed[0])
    return passed


def test_a_log_has_a_line_after_a_second_and_then_every_ten(clock, monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST", 0.01)
    seen = []
    for item in progress.track(range(60), "learning"):
        if not seen:
            time.sleep(0.5)
        seen.append(item)
        clock[0] += 0.5
    assert seen == list(range(60))
    said = ["learning …", "learning 20/60, 10 s", "learning 40/60, 20 s"]
    assert capsys.readouterr().err.splitlines() == said


def test_a_short_loop_says_nothing_in_a_log(clock, capsys):
    assert list(progress.track("abc", "letters")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_a_terminal_without_rich_has_one_line(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress.track("ab", "letters")) == ["a", "b"]
    assert capsys.readouterr().err == "\rletters 0/2\rletters 1/2\rletters 2/2\n"


def test_a_step_of_more_than_a_second_is_named_while_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST", 0.01)
    with progress.step("reading a.npy"):
        time.sleep(0.5)
        assert capsys.readouterr().err == "reading a.npy …\n"
    monkeypatch.setattr(progress, "FIRST", 0.5)
    with progress.step("reading b.npy"):
        pass
    time.sleep(1)
    assert capsys.readouterr().err == ""
