"""The program of docs/how-to/several_gpus.md on two ranks.

Seen red with: models of unlike seeds, which the program compares.
"""

from pathlib import Path

from tests.distributed.test_faults import torchrun

PROGRAM = Path(__file__).parents[2] / "examples/distributed/several_gpus.py"


def test_the_page_runs_on_two_ranks(tmp_path):
    saved = tmp_path / "checkpoint"
    done, errors, results = torchrun(
        PROGRAM, "--out", str(saved), ranks=2, folder=tmp_path / "logs"
    )
    assert not done.returncode, errors
    for rank, text in enumerate(results):
        assert text.startswith(f"rank {rank} of 2: loss")
    assert (saved / ".metadata").exists()
