"""The benchmark's parts on the CPU: gate, floor, cases, suites, peers.

Seen red with: a gate that takes the mean ratio; times for red candidates; a transposed matrix in a
peer; too few bytes for the second order; a peer's failure at full size let out.
"""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness import (
    Candidate,
    Case,
    load_peers,
    load_suite,
    run,
    suite_names,
)
from benchmarks.harness.gate import exact_results, expected_results, worst_ratio
from benchmarks.harness.phases import PHASES, cost
from benchmarks.harness.roofline import GPUS, floor_ms
from benchmarks.workloads.ways import AtFirst
from tests.benches import CPU, DOT, Peer, dot_workload, measured
from tests.cases.o3_workloads import ring_graph
from torchweft.demo.models.potential import Settings
from torchweft.errors import WeftError
from torchweft.testing.contract import assert_same_bits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


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


def test_a_peer_that_fails_while_its_oracle_is_asked_is_left_out():
    """Its function tells the shape of its results first, a recorded one in its second call."""

    class Other(Peer):
        def adapt(self, workload):
            own = tuple(a.clone() for a in workload.inputs)
            return super().adapt(workload)._replace(inputs=own, function=self._fail)

        def _fail(self, x, y):
            raise RuntimeError("cannot be recorded")

    rows, said = measured([Other()], DOT._replace(phases=("forward",)))
    assert [row.peer for row in rows] == ["torchweft"]
    assert said == ["dot forward peer torch: left out: cannot be recorded"]


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


def test_ways_are_left_out():
    """Seen red with ways of peers alone."""
    ways = {"compiled": dot_workload(CPU, None).function}
    case = DOT._replace(build=lambda device, batch: dot_workload(device, batch)._replace(ways=ways))
    peers = [Peer("a"), Peer("a compiled"), Peer("compiled too")]
    (rows,) = run("toy", [case], peers, CPU, print, leave_out={"compiled"})
    assert {(row.peer, row.backend) for row in rows} == {("torchweft", "torch"), ("a", "torch")}


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
        *("torch eager", "torch.compile", "torch segments"),
        *("cuEquivariance", "OpenEquivariance", "LunaEquivariance"),
        *(
            "FastMACE",
            "e3nn",
            "flash-clifford",
            "GATr",
            "L-GATr",
            "spconv",
            "spconv-triton",
            "FlexGEMM",
            "pykeops",
            "FlashLib",
        ),
        "flash-sinkhorn",
    ]
    with pytest.raises(
        WeftError,
        match=r"the suite is 'product': it must be one of clifford, clifford_cpu, cpu, networks, "
        r"o3, o3_cpu, .* or all\. Name one of these; a part of a suite is chosen by --case\.",
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
            *("FastMACE", "flash-clifford", "GATr", "L-GATr", "spconv-triton"),
        ):
            assert isinstance(peer.adapt(workload), str), peer.NAME


def test_models_of_mace_say_what_to_install(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "mace", None)
    said = []
    assert list(run("toy", load_suite("potential", "tiny").cases, [], CPU, said.append)) == [[], []]
    for line in said:
        assert "failed: cases of whole potentials are models of MACE" in line
        assert "pip install mace-torch==0.3.16" in line


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


def test_a_function_is_made_once_and_before_its_call():
    """Of first calls; seen red with a conversion in each call."""
    made, called = [], []
    function = AtFirst(lambda x: made.append(x) or (lambda y: called.append(y) or y))
    function.made(1)
    assert (made, called) == ([1], [])
    assert function(2) == 2
    assert (made, called) == ([1], [2])


def test_first_calls_are_of_cases_and_phases_that_are_there(monkeypatch):
    """Seen red with the name of a case and with a phase that is not measured."""
    monkeypatch.chdir(ROOT)
    load_suite("products")  # which finds the folder
    first_calls = importlib.import_module("benchmarks.first_calls")
    for suite, name, phase in first_calls.CASES + first_calls.CPU_CASES:
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


def test_errors_of_plain_torch_are_taken_at_every_draw():
    """Of one element the error of one draw may be 0, and then no result is right."""
    workload = dot_workload(CPU, 1)._replace(polynomial=False)
    function = workload.function

    def oracle(x, y, scale):
        return function(x, y)

    candidate = Candidate("torchweft", "torch", function, workload.inputs, oracle)
    some = [workload._replace(draws=draws) for draws in (1, 8)]
    one, many = (expected_results("forward", w, candidate, False) for w in some)
    assert many.errors[0].shape == (8, *one.errors[0][0].shape)
    assert_same_bits(many.errors[0][0], one.errors[0][0], "errors at the inputs")
    assert_same_bits(many.values[0], one.values[0], "values")
    assert len(many.errors[0].unique()) > 2
