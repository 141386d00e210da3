"""`benchmarks/several_gpus.py` at small sizes, on one rank and on two, and its table.

Seen red with: efficiencies of strong programs that are not divided by the number of ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.programs import programs_section, ranks_table
from benchmarks.several_gpus import cases

ROOT = Path(__file__).parents[2]


def measured(ranks, out):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "benchmarks.several_gpus", "--small"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_rows_of_one_and_of_two_ranks(tmp_path):
    out = tmp_path / "rows.jsonl"
    for ranks in (1, 2):
        measured(ranks, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {case.name for case in cases(small=True) if not case.name.startswith("mace")}
    for ranks in (1, 2):
        assert names <= {row["case"] for row in rows if row["ranks"] == ranks}
    assert all(row["ms"] > 0 for row in rows)
    assert len(ranks_table(rows).splitlines()) == 2 + len(rows)


def test_efficiencies():
    common = {"case": "a", "nccl_ms": 0.0, "peak_mb": 1.0}
    rows = [
        common | {"kind": kind, "ranks": ranks, "ms": ms}
        for kind, ranks, ms in (
            ("strong", 1, 8.0),
            ("strong", 2, 5.0),
            ("weak", 1, 8.0),
            ("weak", 4, 10.0),
        )
    ]
    lines = ranks_table(rows).splitlines()[2:]
    assert [line.split(" | ")[4] for line in lines] == ["100.0 %", "80.0 %", "100.0 %", "80.0 %"]
    alone = [row for row in rows if row["ranks"] > 1]
    assert all("no time on one" in line for line in ranks_table(alone).splitlines()[2:])


def test_programs_stand_on_the_page():
    """Seen red with: dynamics left out of the list, drifts of 50 steps beside those of 10,000."""
    text = programs_section(ROOT / "benchmarks" / "results")
    for title in ("Dynamics without a thermostat", "Training", "Several GPUs"):
        assert f"### {title}, NVIDIA H" in text
    (few,) = [line for line in text.splitlines() if line.startswith("| MACECalculator | 50 |")]
    assert [cell.strip() for cell in few.split("|")[-3:-1]] == ["", ""]  # drifts of all steps
    assert programs_section(ROOT / "benchmarks") == ""
