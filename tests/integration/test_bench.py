"""The benchmark's parts on the CPU: gate, timer, floor, rows, tables.

Seen red with: a gate that takes the mean ratio; times for red candidates; `read` keeping the first
row; a transposed matrix in a peer; too few bytes for the second order; a page edited by hand; a
peak that does not count what an earlier call left in cycles; a peer's failure at full size let out.
"""

import dataclasses
import gc
import importlib
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.harness import (
    Candidate,
    Case,
    Workload,
    load_peers,
    load_suite,
    run,
    suite_names,
    tables,
    timer,
)
from benchmarks.harness.gate import exact_results, worst_ratio
from benchmarks.harness.phases import PHASES, cost
from benchmarks.harness.record import Row, append, read
from benchmarks.harness.roofline import GPUS, floor_ms
from benchmarks.harness.timer import busy_us, interleave, peak_mb, walls_ms
from tests.cases.o3_workloads import ring_graph
from torchweft.demo.models.potential import Settings
from torchweft.errors import WeftError
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def dot_workload(device, batch):
    """z[n] = s Σ_c x[n,c] y[n,c], by a function that needs no kernel."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(batch or 64, 8, generator=generator) for _ in range(2))
    scale = torch.tensor(-0.5)

    def function(x, y, backend=None):
        return scale * (x * y).sum(1)

    def oracle(x, y, scale):
        return scale * (x * y).sum(1)

    return Workload(
        "dot", (x, y), {"scale": scale}, function, oracle, 2 * x.numel(), 4 * len(x), "N=64 C=8"
    )


class Peer:
    """Someone else: right, or wrong by a part."""

    def __init__(self, name="peer", error=0.0, reason=None):
        self.NAME, self.error, self.reason = name, error, reason

    def missing(self):
        return self.reason

    def adapt(self, workload):
        def function(x, y):
            z = workload.function(x, y)
            last = torch.arange(len(z)) == len(z) - 1
            return z * (1 + self.error * last)

        return Candidate(self.NAME, "torch", function, workload.inputs, workload.oracle)


DOT = Case("dot", "batched", dot_workload, phases=PHASES, backends=("torch",))


def measured(peers=(), case=DOT):
    said = []
    (rows,) = run("toy", [case], peers, CPU, said.append)
    return rows, said


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)


def test_right_candidates_are_timed_in_every_phase():
    rows, said = measured([Peer()])
    assert not said
    assert [(row.phase, row.peer) for row in rows] == [
        (phase, peer) for phase in PHASES for peer in ("torchweft", "peer")
    ]
    for row in rows:
        assert row.bound_ratio <= 1
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert row.reps >= 5


def test_one_wrong_element_is_red():
    """A peer's time is still worth knowing; its error stands beside it."""
    rows, said = measured([Peer("wrong", error=1e-5)])
    for row in rows:
        assert (row.bound_ratio > 1) == (row.peer == "wrong")
        assert row.ms_p50 is not None
    assert "dot forward wrong torch: red" in said[0]


def test_our_own_wrong_element_has_no_time():
    def wrong(device, batch):
        workload = dot_workload(device, batch)
        return workload._replace(
            function=lambda *xy, backend=None: 1.001 * workload.function(*xy, backend=backend)
        )

    rows, said = measured(case=DOT._replace(build=wrong))
    assert [row.ms_p50 for row in rows] == [None] * len(PHASES)
    assert all(row.bound_ratio > 1 for row in rows)
    assert "dot forward torchweft torch: red" in said[0]


def test_our_own_failure_is_red_and_a_peers_leaves_it_out():
    def fails(device, batch):
        return dot_workload(device, batch)._replace(function=_fail)

    def _fail(x, y, backend=None):
        if torch.is_grad_enabled():
            raise RuntimeError("no gradient\nmore")
        return (x * y).sum(1)

    case = DOT._replace(build=fails, phases=("recorded",))
    rows, said = measured([Peer()], case)
    assert [(row.peer, row.bound_ratio, row.ms_p50) for row in rows] == [
        ("torchweft", math.inf, None)
    ]
    assert [line.split("recorded ")[1] for line in said] == [
        "torchweft torch: red: no gradient",
        "peer torch: left out: no gradient",
    ]


def test_a_peer_without_room_for_the_full_size_is_left_out():
    class Dense(Peer):
        def adapt(self, workload):
            found = super().adapt(workload)
            if len(workload.inputs[0]) > 16:
                return found._replace(function=self._fail)
            return found

        def _fail(self, x, y):
            raise torch.OutOfMemoryError("no room\nmore")

    rows, said = measured([Dense()], DOT._replace(check_batch=16, phases=("forward",)))
    assert [(row.peer, row.ms_p50 > 0) for row in rows] == [("torchweft", True)]
    assert said == ["dot forward peer torch: left out: no room"]


def test_a_peer_that_has_a_way_for_the_check_alone_is_left_out():
    """Red before: KeyError 'torch eager torch' of gaussian_1m, whose matrix is checked on 4096."""

    class Dense(Peer):
        def __init__(self, name, fail):
            super().__init__(name)
            self._fail = fail

        def adapt(self, workload):
            return super().adapt(workload) if len(workload.inputs[0]) <= 16 else self._fail()

    def raises():
        raise torch.OutOfMemoryError("no room\nmore")

    peers = [Dense("stored", lambda: "no way"), Dense("built", raises)]
    rows, said = measured(peers, DOT._replace(check_batch=16, phases=("forward",)))
    assert [row.peer for row in rows] == ["torchweft"]
    assert said == ["dot built: left out: no room"]


def test_a_missing_peer_is_left_out_with_its_reason():
    rows, said = measured([Peer("gone", reason="not installed: pip install gone")])
    assert {row.peer for row in rows} == {"torchweft"}
    assert said == ["gone: left out: not installed: pip install gone"]


def test_a_large_case_is_checked_on_fewer_rows_and_says_so():
    rows, _ = measured(case=DOT._replace(check_batch=16, phases=("forward",)))
    assert rows[0].protocol.startswith("checked at batch 16")
    assert rows[0].shape == "N=64 C=8"


def test_a_case_of_ours_that_fails_leaves_the_others():
    """Seen red with an error that ends the run."""

    def fails(device, batch):
        raise torch.OutOfMemoryError("no room\nmore")

    said = []
    found = list(run("toy", [DOT._replace(build=fails), DOT], [], CPU, said.append))
    assert [len(rows) for rows in found] == [0, len(PHASES)]
    assert said == ["dot: failed: no room"]


def test_the_oracle_of_ones_counts_terms():
    workload = dot_workload(CPU, None)
    candidate = Candidate("torchweft", "torch", workload.function, workload.inputs, workload.oracle)
    exact = exact_results("forward", candidate, workload.scale)
    assert set(exact.counts[0].tolist()) == {8.0}
    assert worst_ratio("forward", candidate, exact) <= 1
    assert (
        worst_ratio("forward", candidate._replace(function=lambda x, y: x[:, 0] * math.nan), exact)
        == math.inf
    )


def test_cases_may_round_to_tf32_where_they_say_so():
    """Seen red with a gate that knows no TF32, and with one that always allows it."""
    workload = dot_workload(CPU, None)

    def rounded(a):
        return (a.view(torch.int32) + 4096 & -8192).view(torch.float32)

    def function(x, y, backend=None):
        return workload.function(rounded(x), rounded(y))

    case = Case("dot", "none", lambda device, batch: workload._replace(function=function))
    for tf32 in (False, True):
        rows, _ = measured(case=case._replace(phases=("forward",), tf32=tf32))
        assert rows
        assert all((row.bound_ratio <= 1) == tf32 for row in rows)


def test_cost_counts_what_each_phase_moves():
    workload = dot_workload(CPU, None)
    x, z, t, f = 64 * 8 * 4, 64 * 4, 4, 2 * 64 * 8
    assert cost("forward", workload) == (2 * x + z + t, f)
    assert cost("forward+backward", workload) == (6 * x + 2 * z + 2 * t, 3 * f)
    assert cost("second", workload) == (6 * x + 2 * z + t, 4 * f)


def test_floor_is_the_larger_of_bytes_and_flops():
    gpu = GPUS["NVIDIA H200"]
    assert floor_ms(gpu, int(gpu.bandwidth), 1, "float32", matrix=False) == pytest.approx(1e3)
    flops = int(gpu.matrix["float32"])
    assert floor_ms(gpu, 1, flops, "float32", matrix=True) == pytest.approx(1e3)


def test_calls_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = interleave(calls, CPU, cold=False, budget_s=0.0)
    rounds = ("ab" if turn % 2 == 0 else "ba" for turn in range(timings["a"].reps))
    assert "".join(order) == "ab" + "".join(rounds)


class Clock:
    """A GPU's clock that knows a call's time, and writes down how it was asked."""

    def __init__(self, device, cold):
        pass

    def ms(self, call):
        return call.ms

    def kernels_ms(self, call):
        return call.kernels


class GpuCall:
    """Asynchronous: between events `ms`, of kernels `kernels`, as a graph `graph`."""

    def __init__(self, ms, kernels=None, graph=None):
        self.ms, self.kernels, self.graph = ms, kernels, graph


@pytest.mark.parametrize(
    ("calls", "hosts", "expected"),
    [
        # the processor is ahead of both
        (
            {"a": GpuCall(2.0, graph=GpuCall(1.9)), "b": GpuCall(3.0)},
            {"a": 100.0, "b": 900.0},
            {"a": ("calls", 2.0), "b": ("calls", 3.0)},
        ),
        # a is short: launches are most of it
        (
            {"a": GpuCall(0.05, graph=GpuCall(0.02)), "b": GpuCall(3.0)},
            {"a": 100.0, "b": 900.0},
            {"a": ("graph replay", 0.02), "b": ("calls", 3.0)},
        ),
        # events around b and c hold the processor's time
        (
            {"a": GpuCall(37.0, graph=GpuCall(36.0)), "b": GpuCall(82.3, 41.0, GpuCall(40.0)),
             "c": GpuCall(90.0, 50.0)},
            {"a": 500.0, "b": 86_400.0, "c": 91_000.0},
            {"a": ("graph replay", 36.0), "b": ("graph replay", 40.0), "c": ("kernels", 50.0)},
        ),
    ],
)  # fmt: skip
def test_gpu_times_hold_no_time_of_the_processor(monkeypatch, calls, hosts, expected):
    """Seen red with events around every call: cuEquivariance's training step had 82.3 ms."""
    monkeypatch.setattr(timer, "_Clock", Clock)
    monkeypatch.setattr(timer, "_captured", lambda call: call.graph)
    cuda = torch.device("cuda")
    timings = interleave(calls, cuda, cold=True, budget_s=0.0, hosts=hosts)
    assert {name: (t.how, t.p50) for name, t in timings.items()} == expected


def test_rows_of_a_gpu_have_both_times(monkeypatch):
    runner = importlib.import_module("benchmarks.harness.runner")
    timing = timer.Timing(1.0, 2.0, 3.0, 5, "graph replay")
    monkeypatch.setattr(runner, "interleave", lambda calls, *_, **__: dict.fromkeys(calls, timing))
    monkeypatch.setattr(runner, "host_us", lambda call: 86_400.0)
    monkeypatch.setattr(runner, "walls_ms", lambda calls: dict.fromkeys(calls, 90.0))
    monkeypatch.setattr(runner, "peak_mb", lambda call: 7.0)
    measure, gpu = runner._measure, torch.device("cuda")
    monkeypatch.setattr(runner, "_measure", lambda calls, device: measure(calls, gpu))
    rows, _ = measured([Peer()])
    found = {(r.peer, r.l2, r.ms_p50, r.wall_ms, r.host_us, r.peak_mb) for r in rows}
    assert found == {
        (peer, l2, 2.0, 90.0, 86_400.0, 7.0)
        for peer in ("torchweft", "peer")
        for l2 in ("cold", "warm")
    }
    assert {row.protocol.split(", ")[-1] for row in rows} == {"graph replay"}


def test_kernels_that_overlap_count_once():
    """Seen red with a sum."""
    assert busy_us([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (1.5, 3.0)]) == 6.0
    assert busy_us([]) == 0.0


def test_walls_hold_what_the_processor_waits_for(monkeypatch):
    """Two calls of which one returns at once and is done 2 ms later."""
    monkeypatch.setattr(timer, "WALL_S", 0.01)
    pending = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: [time.sleep(s) for s in pending])
    monkeypatch.setattr(timer, "_back_to_back_ms", _counted(timer._back_to_back_ms, pending))
    walls = walls_ms({"slow": lambda: pending.append(0.002), "quick": lambda: None})
    assert walls["slow"] >= 2.0 > walls["quick"]


def _counted(measure, pending):
    def counted(call, count):
        pending.clear()
        return measure(call, count)

    return counted


def test_rows_of_before_walls_and_shares_are_read(tmp_path):
    rows, _ = measured()
    fields = dataclasses.asdict(rows[0])
    del fields["wall_ms"], fields["right"]
    (tmp_path / "old.jsonl").write_text(json.dumps(fields) + "\n")
    (row,) = read(tmp_path / "old.jsonl")
    assert (row.wall_ms, row.right) == (None, None)


def test_peaks_count_what_earlier_calls_left_in_cycles(monkeypatch):
    class Megabyte:
        alive = most = 0

        def __init__(self):
            self.cycle = self
            Megabyte.alive += 1
            Megabyte.most = max(Megabyte.most, Megabyte.alive)

        def __del__(self):
            Megabyte.alive -= 1

    def reset():
        Megabyte.most = Megabyte.alive

    def call():
        gc.collect()
        Megabyte()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: Megabyte.alive * 10**6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: Megabyte.most * 10**6)
    call()
    assert peak_mb(call) == 1


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
    sections = [line for line in page.splitlines() if line.startswith("## ")]
    assert sections == [f"## {rows[0].gpu}", "## another machine"]
    assert page.count("| dot |") == 3 * len(PHASES)


def test_readme_table_stands_between_its_markers(tmp_path, monkeypatch):
    rows, _ = measured()
    monkeypatch.setattr(tables, "HEADLINES", {"toy": ("dot",)})
    append(tmp_path / "cpu" / "products.jsonl", rows)
    slower, slowest = (dataclasses.replace(rows[0], peer=f"peer {n}", ms_p50=n) for n in (7.0, 9.0))
    append(tmp_path / "cpu" / "products.jsonl", [slowest, slower])
    text = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    new = tables.readme_with_table(text, tmp_path)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    lead = f"{7.0 / rows[0].ms_p50:.3g}"
    assert f"| dot | {rows[0].ms_p50:.3g} · peer 7.0 7 · **{lead}** |" in new
    assert tables.readme_with_table(new, tmp_path) == new


def with_peers(tmp_path, rows, *peers):
    """A folder of our first row and of peers: name, GPU and wall time, error."""
    ours = dataclasses.replace(rows[0], ms_p50=2.0, wall_ms=4.0)
    made = [ours]
    for name, gpu, wall, error in peers:
        fields = {"peer": name, "ms_p50": gpu, "wall_ms": wall, "bound_ratio": error, "right": 0.15}
        made.append(dataclasses.replace(ours, **fields))
    append(tmp_path / "cpu" / "products.jsonl", made)
    return tmp_path


def test_leads_are_over_the_fastest_right_peer(tmp_path, monkeypatch):
    """Red before: the fastest peer of all, and its time on the processor as the GPU's."""
    monkeypatch.setattr(tables, "HEADLINES", {"toy": ("dot",)})
    rows, _ = measured()
    peers = [("wrong", 1.0, 1.5, 57.0), ("a", 5.0, 30.0, 0.5), ("b", 8.0, 10.0, 0.5)]
    folder = with_peers(tmp_path, rows, *peers)
    (line,) = [x for x in tables.performance_page(folder).splitlines() if x.startswith("| dot")]
    cells = [cell.strip() for cell in line.split("|")]
    assert "1 / 1.5, error 57, 15 % right" in cells
    assert cells[8:10] == ["2.5 / 2.5", "a / b"]
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", folder)
    assert "| dot | 2 / 4 · a 5 / 30 · **2.5 / 2.5** |" in readme
    (picture,) = tables.pictures(folder).values()
    texts = [node.text for node in ElementTree.fromstring(picture).findall("{*}text")]
    assert texts[-3:] == ["dot, forward, torch", "2.5", "2.5"]


def test_lines_without_a_right_peer_have_no_lead(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "HEADLINES", {"toy": ("dot",)})
    rows, _ = measured()
    folder = with_peers(tmp_path, rows, ("wrong", 1.0, None, 57.0))
    page = tables.performance_page(folder)
    assert "| lead |" not in page
    assert "![" not in page
    readme = tables.readme_with_table(f"{tables.BEGIN}\n{tables.END}", folder)
    assert "| dot | 2 / 4 · wrong 1, error 57, 15 % right |" in readme
    assert tables.pictures(folder) == {}


def test_pages_of_this_repository_are_those_of_its_rows():
    results, readme = ROOT / "benchmarks" / "results", (ROOT / "README.md").read_text("utf-8")
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    assert page == tables.performance_page(results), "run python -m benchmarks.harness.tables"
    images = (ROOT / "docs" / "images").glob(f"{tables.PICTURE}*.svg")
    found = {path.name: path.read_text("utf-8") for path in images}
    assert found == tables.pictures(results), "run python -m benchmarks.harness.tables"
    assert tables.BEGIN in readme
    assert readme == tables.readme_with_table(readme, results), (
        "run python -m benchmarks.harness.tables"
    )


def test_our_rows_in_this_repository_have_no_time_without_a_green_check():
    for path in (ROOT / "benchmarks" / "results").glob("*/*.jsonl"):
        row: Row
        for row in read(path):
            assert row.bound_ratio <= 1 or row.ms_p50 is None or row.peer != "torchweft", row


def test_every_candidate_computes_every_workload(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("benchmarks.harness.runner._measure", lambda *_: {})
    peers = [peer for peer in load_peers() if peer.NAME != "torch.compile"]
    named = [
        case._replace(build=lambda device, _, build=case.build: build(device, 6), check_batch=None)
        for case in load_suite("products").cases
    ]
    small = [*named, *load_suite("sizes", "32KB").cases]
    for case, rows in zip(small, run("toy", small, peers, CPU, print), strict=True):
        assert {"torchweft", "torch eager"} <= {row.peer for row in rows}, case.name
        for row in rows:
            assert row.bound_ratio <= 1, row


def test_suites_and_peers_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert {"products", "sizes", "cpu"} <= set(suite_names())
    assert [case.name for case in load_suite("products", "P2").cases] == ["P2 tensor_dot"]
    names = [peer.NAME for peer in load_peers()]
    assert names == [
        *("torch eager", "torch.compile", "cuEquivariance", "OpenEquivariance", "LunaEquivariance"),
        *("e3nn", "flash-clifford", "spconv", "spconv-triton", "FlexGEMM", "pykeops", "FlashLib"),
        "flash-sinkhorn",
    ]
    with pytest.raises(
        WeftError,
        match=r"the suite is 'product': it must be one of clifford, clifford_cpu, cpu, o3, o3_cpu,"
        r".* or all\. Name one of these; a part of a suite is chosen by --case\.",
    ):
        load_suite("product")
    for name in suite_names():  # red before: training, contraction and uuu lay among them
        assert load_suite(name).cases
    assert {"cpu", "o3_cpu"} <= set(suite_names("cpu")) < set(suite_names())
    assert not set(suite_names("cpu")) & set(suite_names("cuda"))
    with pytest.raises(WeftError, match="no case of suite 'cpu' has 'W5' in its name"):
        load_suite("cpu", "W5")


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("reductions", "sinkhorn_100k"),
        ("reductions", "nearest_1m_by_cells"),
        ("o3", "W1r mace_L2_carbon, radial linear"),
    ],
)
def test_peers_refuse_what_they_do_not_compute(monkeypatch, suite, name):
    """Seen red with operations that a peer looks up though it does not know them."""
    monkeypatch.chdir(ROOT)
    (case,) = (case for case in load_suite(suite).cases if case.name == name)
    workload = case.build(CPU, 8)
    for peer in load_peers():
        if peer.NAME in (
            *("torch eager", "torch.compile", "OpenEquivariance", "LunaEquivariance", "e3nn"),
            *("flash-clifford", "spconv-triton"),
        ):
            assert isinstance(peer.adapt(workload), str), peer.NAME


def test_cells_find_the_nearest(monkeypatch):
    """Seen red with neighbours of the next point."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("benchmarks.harness.runner._measure", lambda *_: {})
    from benchmarks.workloads.neighbours import neighbours_case

    case = neighbours_case("small", 500)
    (rows,) = run("toy", [case], (), CPU, print)
    assert [(row.bound_ratio <= 1, row.right) for row in rows] == [(True, 1.0)]


class Neighbours(Peer):
    """Finds the nearest of the first half of the points; as FlashLib, it takes the check's rows."""

    def adapt(self, workload):
        k = workload.tables["neighbours"]

        def function(x, y, *rest):
            half = y[: len(y) // 2]
            return torch.cdist(x, half).square().sort(-1).values[:, :k]

        return Candidate(self.NAME, "torch", function, workload.inputs, workload.oracle)


@pytest.mark.parametrize("cells", [True, False])
def test_rows_say_how_many_neighbours_are_right(monkeypatch, cells):
    """Red before: a check against as many points as rows, where far points are told apart."""
    monkeypatch.setattr("benchmarks.harness.runner._measure", lambda *_: {})
    from benchmarks.workloads import formulas, neighbours

    if cells:
        case = neighbours.neighbours_case("some", 2000)
    else:
        monkeypatch.setattr(formulas, "CHECKED_NUMBERS", 100 * 2000 * 3)
        case = formulas.formula_case("some", "nearest", 2000, 2000)
        case = case._replace(backends=("torch",))
    assert len(case.build(CPU, case.check_batch).inputs[1]) == 2000
    assert len(case.build(CPU, case.check_batch).inputs[0]) < 2000
    (rows,) = run("toy", [case], [Neighbours("half")], CPU, print)
    ours, half = rows
    assert (ours.right, ours.bound_ratio <= 1) == (1.0, True)
    assert 0.0 < half.right < 0.5 < 1 < half.bound_ratio


def test_first_calls_are_of_cases_and_phases_that_are_there(monkeypatch):
    """Seen red with the name of a case and with a phase that is not measured."""
    monkeypatch.chdir(ROOT)
    load_suite("products")  # which finds the folder
    first_calls = importlib.import_module("benchmarks.first_calls")
    for suite, name, phase in first_calls.CASES:
        assert phase in first_calls.case_of(suite, name).phases, name


class OtherConvolution:
    """A peer of training steps: its convolution is the formula, or wrong by a part."""

    def __init__(self, name, error):
        self.NAME, self.error = name, error

    def missing(self):
        return None

    def adapt(self, workload):
        from benchmarks.workloads.equivariant import coefficients_of, tensor_product
        from benchmarks.workloads.training import Library, by_library

        def convolution(layer, like):
            scale = torch.cat([c.flatten() for c in coefficients_of(layer)]).to(like)

            def function(x, y, w, src, dst):
                messages = tensor_product(layer, x[src], y, w, (1 + self.error) * scale)
                return x.new_zeros(len(x), layer.out.dim).index_add(0, dst, messages)

            return function

        return by_library(self.NAME, "torch", workload, Library(convolution))


def test_a_training_step_takes_other_layers(monkeypatch):
    monkeypatch.chdir(ROOT)
    load_suite("o3")  # puts the clone on the path
    from benchmarks.workloads.training import training_case

    case = training_case("step", Settings(channels=2, lmax=1, layers=3, radial=4), 2, 2)
    peers = [OtherConvolution("right", 0.0), OtherConvolution("wrong", 1e-5)]
    (rows,) = run("toy", [case], peers, CPU, print)
    assert [(row.peer, row.bound_ratio <= 1) for row in rows] == [
        ("torchweft", True),
        ("right", True),
        ("wrong", False),
    ]


def test_symmetric_contractions_are_maces(monkeypatch):
    monkeypatch.chdir(ROOT)
    load_suite("o3")  # puts the clone on the path
    from benchmarks.workloads.contraction import contraction_case

    case = contraction_case("small", "2x0e+2x1o+2x2e", "2x0e+2x1o", 3, 4, 6)
    (rows,) = run("toy", [case], [], CPU, print)
    assert [row.phase for row in rows if row.bound_ratio <= 1] == list(case.phases)


def test_openequivariance_sums_in_order_where_it_can(monkeypatch):
    monkeypatch.chdir(ROOT)
    (peer,) = (peer for peer in load_peers() if peer.NAME == "OpenEquivariance")
    src, dst = ring_graph(20, 4)
    order = peer.transposing(src, dst)
    assert_same_bits(src[order], dst, "the transposed graph's targets")
    assert_same_bits(dst[order], src, "the transposed graph's sources")
    assert peer.transposing(src.flip(0), dst.flip(0)) is None  # not sorted
    assert peer.transposing(src.clone(), (dst + 1) % 20) is None  # not symmetric


@pytest.mark.parametrize(
    ("case", "reason"),
    [("W3s", "shared weights that mix channels"), ("W5", "uvu or uvw"), ("W4l", "no layer of")],
)
def test_openequivariance_says_what_it_lacks(monkeypatch, case, reason):
    monkeypatch.chdir(ROOT)
    (peer,) = (peer for peer in load_peers() if peer.NAME == "OpenEquivariance")
    (workload,) = (case.build(CPU, 2) for case in load_suite("o3", case).cases)
    assert reason in peer.adapt(workload)


def test_suites_and_peers_load_without_ase():
    lines = ["import sys", "sys.modules['ase'] = None", "from benchmarks.harness import suites"]
    lines += ["[suites.load_suite(name) for name in suites.suite_names()]", "suites.load_peers()"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=True)
