"""Rows in files, and the pages that are generated from them.

Seen red with `read` keeping the first row and with a page edited by hand.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness import tables
from benchmarks.harness.phases import PHASES
from benchmarks.harness.record import Row, append, read
from tests.benches import Peer, measured

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)


def test_rows_survive_the_file_and_the_latest_counts(tmp_path):
    rows, _ = measured()
    path = tmp_path / "cpu" / "toy.jsonl"
    append(path, rows)
    newer = dataclasses.replace(rows[0], ms_p50=123.0)
    append(path, [newer])
    found = read(path)
    assert found[0].ms_p50 == 123.0
    assert [row.key for row in found] == [row.key for row in rows]
    assert [row.ms_p50 for row in found[1:]] == pytest.approx(
        [row.ms_p50 for row in rows[1:]], rel=1e-5
    )


def test_rows_of_before_walls_and_shares_are_read(tmp_path):
    rows, _ = measured()
    fields = dataclasses.asdict(rows[0])
    del fields["wall_ms"], fields["right"]
    (tmp_path / "old.jsonl").write_text(json.dumps(fields) + "\n")
    (row,) = read(tmp_path / "old.jsonl")
    assert (row.wall_ms, row.right) == (None, None)


def with_peers(tmp_path, rows, *peers):
    """A folder of our first row and of peers: name, GPU and wall time, error."""
    ours = dataclasses.replace(rows[0], ms_p50=2.0, wall_ms=4.0)
    made = [ours]
    for name, gpu, wall, error in peers:
        fields = {"peer": name, "ms_p50": gpu, "wall_ms": wall, "bound_ratio": error, "right": 0.15}
        made.append(dataclasses.replace(ours, **fields))
    append(tmp_path / "cpu" / "products.jsonl", made)
    return tmp_path


def test_pages_show_a_wrong_peers_error(tmp_path):
    rows, _ = measured([Peer("torch eager", error=0.01)])
    path = tmp_path / "cpu" / "products.jsonl"
    append(path, rows)
    rows = read(path)  # numbers are rounded there, and again on the page
    page = tables.performance_page(tmp_path)
    lines = [line for line in page.splitlines() if line.startswith("| dot")]
    assert len(lines) == len(PHASES)
    for line, ours in zip(lines, rows[::2], strict=True):
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4].startswith(f"{ours.ms_p50:.3g} [")
        assert ", error " in cells[5]


def test_pages_show_one_call_without_a_spread(tmp_path):
    """Seen red with digits in powers of ten, and with a spread."""
    rows, _ = measured()
    once = [
        dataclasses.replace(r, ms_p20=1983.2, ms_p50=1983.2, ms_p80=1983.2, reps=1) for r in rows
    ]
    append(tmp_path / "cpu" / "x.jsonl", once)
    assert " | 1983 | " in tables.performance_page(tmp_path)


def test_records_keep_what_ran_before(tmp_path):
    """Of tests that a GPU alone runs.  Seen red with a file that is begun anew."""
    path, tests = tmp_path / "tests.json", tmp_path / "test_some.py"
    for body in ("def test_a(): pass\ndef test_b(): pass", "def test_b(): assert False"):
        tests.write_text(body)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.record", str(tests)]
        options = ["--record", str(path), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        subprocess.run([*command, *options], cwd=ROOT, capture_output=True, check=False)
    found = {
        name.split("::")[1]: how.split(" ")[0] for name, how in json.loads(path.read_text()).items()
    }
    assert found == {"test_a": "passed", "test_b": "failed"}


def test_records_of_a_run_that_is_ended_are_there(tmp_path):
    """Red before: the file was written when all tests were done."""
    path, tests = tmp_path / "tests.json", tmp_path / "test_some.py"
    tests.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.record", str(tests)]
    options = ["--record", str(path), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 3
    assert [name.split("::")[1] for name in json.loads(path.read_text())] == ["test_a"]


def test_pages_show_red_for_ours_without_a_time(tmp_path):
    rows, _ = measured()
    red = [dataclasses.replace(row, ms_p50=None, bound_ratio=2.0) for row in rows]
    append(tmp_path / "cpu" / "products.jsonl", red)
    page = tables.performance_page(tmp_path)
    assert page.count("| red |") == len(PHASES)


def test_pages_have_one_section_a_machine(tmp_path):
    """Seen red with: a section for each file."""
    rows, _ = measured()
    other = [dataclasses.replace(row, gpu="another machine") for row in rows]
    for name, found in {"voxels": rows, "products": other, "o3": rows}.items():
        append(tmp_path / "cpu" / f"{name}.jsonl", found)
    page = tables.performance_page(tmp_path)
    sections = re.findall(r"^## (?!How).*", page, re.MULTILINE)
    assert sections == [f"## {rows[0].gpu}", "## another machine"]
    assert page.count("| dot |") == 3 * len(PHASES)


def test_readme_table_stands_between_its_markers(tmp_path, monkeypatch):
    rows, _ = measured()
    rows[0] = dataclasses.replace(rows[0], ms_p50=2.0)
    monkeypatch.setattr(tables, "HEADLINES", {"toy": {"dot": "a product"}})
    append(tmp_path / "cpu" / "products.jsonl", rows)
    slower, slowest = (dataclasses.replace(rows[0], peer=f"peer {n}", ms_p50=n) for n in (7.0, 9.0))
    append(tmp_path / "cpu" / "products.jsonl", [slowest, slower])
    text = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    new = tables.readme_with_table(text, tmp_path)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert f"| a product | {rows[0].gpu} | 2 · peer 7.0 7 · **3.5** |" in new
    assert tables.readme_with_table(new, tmp_path) == new


def texts(picture):
    """All that is written in an SVG."""
    return [
        node.text
        for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_leads_are_over_the_fastest_right_peer(tmp_path, monkeypatch):
    """Red before: the fastest peer of all, and its time on the processor as the GPU's.

    And both times of the peer with the least wall time, beside a lead over two peers.
    """
    monkeypatch.setattr(tables, "HEADLINES", {"toy": {"dot": "a product"}})
    rows, _ = measured()
    peers = [("wrong", 1.0, 1.5, 57.0), ("a", 5.0, 30.0, 0.5), ("b", 8.0, 10.0, 0.5)]
    folder = with_peers(tmp_path, rows, *peers)
    (line,) = [x for x in tables.performance_page(folder).splitlines() if x.startswith("| dot")]
    cells = [cell.strip() for cell in line.split("|")]
    assert "1 / 1.5, error 57, 15 % right" in cells
    assert cells[8:10] == ["2.5 / 2.5", "a / b"]
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", folder)
    assert f"| a product | {rows[0].gpu} | 2 / 4 · a 5 / b 10 · **2.5 / 2.5** |" in readme
    (picture,) = tables.pictures(folder).values()
    found = texts(picture)
    assert found.count("2.5") == 2
    assert {"dot, forward, torch", "GPU", "wall"} <= set(found)


def test_a_peer_as_fast_as_the_fastest_is_named_alone(tmp_path, monkeypatch):
    """Of two whose GPU times read the same; seen red with both names beside one number."""
    monkeypatch.setattr(tables, "HEADLINES", {"toy": {"dot": "a product"}})
    rows, _ = measured()
    folder = with_peers(tmp_path, rows, ("a", 5.0, 30.0, 0.5), ("b", 5.0001, 10.0, 0.5))
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", folder)
    assert f"| a product | {rows[0].gpu} | 2 / 4 · b 5 / 10 · **2.5 / 2.5** |" in readme


def test_lines_without_a_right_peer_have_no_lead(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HEADLINES", {"toy": {"dot": "a product"}})
    rows, _ = measured()
    folder = with_peers(tmp_path, rows, ("wrong", 1.0, None, 57.0))
    page = tables.performance_page(folder)
    assert "| lead |" not in page
    assert "![" not in page
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", folder)
    assert f"| a product | {rows[0].gpu} | 2 / 4 · wrong 1, error 57, 15 % right |" in readme
    assert tables.pictures(folder) == {}


def test_pages_of_this_repository_are_those_of_its_rows():
    results, readme = ROOT / "benchmarks" / "results", (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert page == tables.performance_page(results), "run python -m benchmarks.harness.tables"
    images = (ROOT / "docs" / "images").glob(f"{tables.PICTURE}*.svg")
    found = {path.name: texts(path.read_text("utf-8")) for path in images}
    made = {name: texts(picture) for name, picture in tables.pictures(results).items()}
    assert found == made, "run python -m benchmarks.harness.tables"
    assert tables.BEGIN in readme
    assert readme == tables.readme_with_table(readme, results), (
        "run python -m benchmarks.harness.tables"
    )


def test_our_rows_in_this_repository_have_no_time_without_a_green_check():
    for path in (ROOT / "benchmarks" / "results").glob("*/*.jsonl"):
        row: Row
        for row in read(path):
            assert row.bound_ratio <= 1 or row.ms_p50 is None or row.peer != "torchweft", row


def test_eager_calls_are_compared_with_eager_calls(tmp_path):
    """Seen red with all ways of a peer beside our eager call, and with our fastest on the GPU.

    And with a call that is compiled and captured as an eager one.
    """
    rows, _ = measured()
    ours = dataclasses.replace(rows[0], suite="potential", case="512 atoms forces")
    times = {
        ("torchweft", "triton"): (2.0, 9.0),
        ("torchweft", "captured"): (3.0, 3.0),
        ("torchweft", "compiled captured"): (3.5, 3.5),
        ("a peer", "cuda"): (4.0, 18.0),
        ("a peer captured", "cuda"): (6.0, 6.0),
    }
    made = [
        dataclasses.replace(ours, peer=peer, backend=backend, ms_p50=gpu, wall_ms=wall)
        for (peer, backend), (gpu, wall) in times.items()
    ]
    append(tmp_path / "cpu" / "o3.jsonl", made)
    page = tables.performance_page(tmp_path)
    eager, captured, both = (line for line in page.splitlines() if line.startswith("| 512 atoms"))
    assert "| 2 / 2 | a peer |" in eager
    assert "| 1.33 / 2 | a peer / a peer captured |" in captured
    assert "| 1.14 / 1.71 | a peer / a peer captured |" in both
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", tmp_path)
    assert "| 3 / 3 · a peer 4 / a peer captured 6 · **1.33 / 2** |" in readme


def test_headlines_are_of_the_machine_that_ran_last(tmp_path, monkeypatch):
    """Seen red with the first machine's rows, whose peers were not the fastest of today."""
    monkeypatch.setattr(tables, "HEADLINES", {"toy": {"dot": "a product"}})
    rows, _ = measured()
    cases = [("NVIDIA H200", "2026-01-01", 9.0), ("NVIDIA H100 80GB HBM3", "2026-02-01", 3.0)]
    for gpu, date, theirs in cases:
        ours = dataclasses.replace(rows[0], gpu=gpu, date=date, driver="1", l2="cold", ms_p50=2.0)
        peer = dataclasses.replace(ours, peer="a peer", ms_p50=theirs)
        append(tmp_path / gpu / "toy.jsonl", [ours, peer])
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", tmp_path)
    assert "| a product | H100 | 2 · a peer 3 · **1.5** |" in readme
    assert "a product (H100)" in texts(tables.pictures(tmp_path)[tables.HEADLINE_PICTURE])


def test_small_leads_say_what_bounds_them(tmp_path):
    """Of the fastest backend on the last machine; seen red with every backend, and with walls only.

    And with the first machine's rows, and a bound by the host where the GPU's time is behind too.
    """
    rows, _ = measured()
    ours = dataclasses.replace(
        rows[0], gpu="NVIDIA H200", driver="1", l2="cold", roofline_pct=10.0, date="2026-02-01"
    )

    def line(case, mine, theirs, **more):
        """Rows of a case: (GPU time, wall time) of ours and of a peer."""
        made = dataclasses.replace(ours, case=case, ms_p50=mine[0], wall_ms=mine[1], **more)
        peer = {"peer": "a peer", "ms_p50": theirs[0], "wall_ms": theirs[1]}
        append(tmp_path / made.gpu / "toy.jsonl", [made, dataclasses.replace(made, **peer)])

    line("by the host", (1.0, 4.0), (3.0, 3.5))
    line("by the floor", (1.0, 1.1), (1.2, 2.2), roofline_pct=70.0)
    line("by what", (1.0, 4.0), (1.2, 9.0))
    line("ahead", (9.0, 9.0), (2.0, 2.0), backend="slow")
    line("ahead", (9.0, 9.0), (2.0, 2.0), gpu="NVIDIA A100", date="2026-01-01")
    line("ahead", (1.0, 1.0), (2.0, 2.0))
    page = tables.performance_page(tmp_path)
    section = page[page.index("## Where the lead is small") :]
    found = [row.split(" | ") for row in section.splitlines() if row.startswith("| toy | ")]
    assert {cells[1]: (cells[4], cells[6].removesuffix(" |")) for cells in found} == {
        "by the host": ("3 / 0.875", "host: kernels run 1 of 4 ms"),
        "by the floor": ("1.2 / 2", "floor: 70 % of what the machine allows"),
        "by what": ("1.2 / 2.25", "not known, 10 % of the floor"),
    }
