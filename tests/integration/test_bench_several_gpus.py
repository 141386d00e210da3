"""`benchmarks/several_gpus.py` at small sizes, on one rank, two and four, and its table.

Seen red with: efficiencies of strong programs that are not divided by the number of ranks, long
programs that are repeated, older rows in place of later ones, clocks from before a call.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import several_gpus
from benchmarks.harness.clock import sm_clock
from benchmarks.harness.programs import programs_section, ranks_table
from benchmarks.several_gpus import FEW, REPEATS, Case, Part, cases

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
def test_rows_of_one_two_and_four_ranks(tmp_path):
    out, several = tmp_path / "rows.jsonl", (1, 2, 4)
    for ranks in several:
        measured(ranks, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {case.name for case in cases(small=True) if not case.name.startswith("mace")}
    for ranks in several:
        assert names <= {row["case"] for row in rows if row["ranks"] == ranks}
    assert all(0 < row["ms"] < 1000 * row["seconds"] for row in rows)
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


def test_efficiencies_relative_to_two_and_the_latest_rows():
    common = {"case": "a", "kind": "strong", "nccl_ms": 0.0, "peak_mb": 1.0}
    rows = [
        common | {"ranks": ranks, "ms": ms}
        for ranks, ms in ((4, 9.0), (2, 8.0), (4, 5.0))  # the second run on four has the right time
    ]
    rows[-1] |= {"busy_ms": 4.5, "sm_mhz": 1410.0}
    head, _, two, four = ranks_table(rows).splitlines()
    assert "busy ms" in head
    assert "| 2 | 8 | no time on one |  | 0 |  | 1 |" in two
    assert "| 4 | 5 | 80.0 % of 2 | 4.5 | 0 | 1410 | 1 |" in four


@pytest.mark.parametrize(
    ("long", "slow", "first", "calls"),
    [
        (0.0, 0.0, True, (1, 1)),  # of the smaller problem, of the program
        (9.0, 9.0, True, (1, 2 + REPEATS)),
        (0.0, 9.0, False, (0, 3 + REPEATS)),
        (0.0, 0.0, False, (0, 3 + FEW)),
    ],
)
def test_long_programs_are_made_once(monkeypatch, long, slow, first, calls):
    monkeypatch.setattr(several_gpus, "LONG", long)
    monkeypatch.setattr(several_gpus, "SLOW", slow)
    made = {"smaller": 0, "program": 0}

    def program(name, part):
        def call():
            made[name] += 1

        return call

    part = Part(0, 1, torch.device("cpu"))
    smaller = (lambda part: program("smaller", part)) if first else None
    case = Case("a", "strong", lambda part: program("program", part), smaller)
    found = several_gpus.measured(case, case.build(part), part, lambda begin: 1755)
    assert tuple(made.values()) == calls
    assert found["sm_mhz"] == 1755
    assert "sm_mhz" not in several_gpus.measured(case, case.build(part), part, lambda begin: 0)


def test_kernels_of_nccl_and_others(monkeypatch):
    """Seen red with: kernels of two streams that overlap, counted twice."""

    def events(call):
        call()
        spans = ("gaussian", 0, 500), ("ncclDevKernel_SendRecv", 100, 300), ("Memcpy", 400, 900)
        return [
            SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))
            for name, start, end in spans
        ]

    monkeypatch.setattr(several_gpus, "events_on_gpu", events)
    assert several_gpus._profiled(lambda: 2.0) == (2.0, 0.2, 0.9)


def test_the_clock_is_the_least_since_a_moment(monkeypatch, tmp_path):
    """A program in place of nvidia-smi, which does not flush what it prints."""
    names = tmp_path / "arguments"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        f"open({str(names)!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        "for text in ('1755', '[N/A]', '1980', '1410'):\n    print(text)\ntime.sleep(60)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    properties = SimpleNamespace(uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    begin = time.perf_counter()
    with sm_clock(torch.device("cuda", 0)) as least:
        while least(begin) != 1410:
            assert time.perf_counter() < begin + 30
            time.sleep(0.01)
        assert not least(time.perf_counter())
    assert "--id=GPU-1-2" in names.read_text()
    monkeypatch.setenv("PATH", "")
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        with sm_clock(device) as least:
            assert not least(begin)


def test_programs_stand_on_the_page():
    """Seen red with: dynamics left out of the list, drifts of 50 steps beside those of 10,000.

    And with second runs on a machine left out.
    """
    text = programs_section(ROOT / "benchmarks" / "results")
    for title in ("Dynamics without a thermostat", "Training", "Several GPUs"):
        assert f"### {title}, NVIDIA H" in text
    for remark in ("", " on a slower host"):
        assert f"### Networks on a LiDAR frame, NVIDIA H200{remark}\n" in text
    (few,) = [line for line in text.splitlines() if line.startswith("| MACECalculator | 50 |")]
    assert [cell.strip() for cell in few.split("|")[-3:-1]] == ["", ""]  # drifts of all steps
    assert programs_section(ROOT / "benchmarks") == ""
