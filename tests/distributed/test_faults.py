"""A rank that raises ends the others with its name and its error.

Seen red with: the wait for others at the end of the block left out (they have results).
"""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed

from tests.distributed import failing
from tests.ranks import KIND, SECONDS, SIZE, ended, run
from torchweft.distributed import faults, propagate_errors
from torchweft.errors import RankError

PROGRAM = Path(failing.__file__)


def torchrun(program, *arguments, ranks, folder):
    """(what ended, stderr of each rank, stdout of each rank); GPUs are seen if ranks have them."""
    hidden = {} if KIND == "cuda" and ranks <= SIZE else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--log-dir", str(folder), "--redirects", "3"]
    done = subprocess.run(
        [*command, str(program), *arguments],
        env={**os.environ, **hidden, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    logs = [sorted(folder.glob(f"*/attempt_0/*/{name}.log")) for name in ("stderr", "stdout")]
    said = [[log.read_text() for log in one] for one in logs]
    return done, *said


def told(texts):
    """Whether each of three ranks ended with the name and the error of the first."""
    assert len(texts) == 3
    for rank, text in enumerate(texts):
        assert "OutOfAtomsError: no atoms are left" in text, (rank, text)
        assert "rank 1 raised OutOfAtomsError" in text or rank == 1, (rank, text)
        assert "has a result" not in text


def test_torchrun_ends_with_the_name_and_the_error_of_the_first(tmp_path):
    done, errors, results = torchrun(PROGRAM, ranks=3, folder=tmp_path)
    assert done.returncode
    assert b"rank      : 1" in done.stderr  # torchrun's own summary, by @record
    told([error + result for error, result in zip(errors, results, strict=True)])


@pytest.mark.parametrize("where", [failing.in_a_halo, failing.in_a_ring])
def test_every_rank_ends_with_the_name_and_the_error_of_the_first(where, tmp_path):
    told(ended(failing.fails, 3, tmp_path, where))


def divide(group, number):
    with propagate_errors(group), propagate_errors(group):
        return 1 / number


def leaving(rank, size, group, failing):
    group = distributed.new_group()  # of no use after the error, so not the pool's
    for _ in range(2):
        with propagate_errors(group), propagate_errors(group):
            total = torch.ones(1)
            distributed.all_reduce(total, group=group)
    assert total == size
    with pytest.raises((RankError, ZeroDivisionError)) as raised:
        divide(group, float(rank != failing))
    return raised.type, str(raised.value)


@pytest.mark.parametrize("failing", [0, SIZE - 1])
def test_all_leave_the_block_or_all_raise(failing):
    found = run(leaving, SIZE, failing)
    assert found.pop(failing)[0] is ZeroDivisionError
    for kind, text in found:
        assert kind is RankError
        assert text.startswith(f"rank {failing} raised ZeroDivisionError: float division")
        assert text.endswith(f"See the traceback of rank {failing}.")


def computing_on(rank, size, group):
    exited = threading.Event()
    with (
        mock.patch.object(faults.os, "_exit", lambda code: exited.set()),  # noqa: PT008
        mock.patch.object(faults, "GRACE", 0.5),
        contextlib.suppress(RankError, ZeroDivisionError),
        propagate_errors(distributed.new_group()),
    ):
        assert rank or 1 // 0
        exited.wait()
    return exited.is_set()


def test_the_process_of_a_rank_that_does_not_leave_exits():
    assert run(computing_on, SIZE) == [False, *[True] * (SIZE - 1)]


def test_one_rank_needs_no_group():
    with pytest.raises(ZeroDivisionError):
        divide(None, 0)
