"""The command line: a doctor that works on broken machines, errors without tracebacks.

Broken machines are simulated by a sitecustomize that refuses imports, in this process's children
and in theirs.  Seen red with: doctor importing torch itself, a fatal finding that exits with 0,
a WeftError that is not caught; help of the demo behind its imports, a doctor that asks for a report
of what is no more than torch that is missing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from tests import check
from torchweft import __version__, cli, doctor
from torchweft.errors import ShapeError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise {error}
sys.meta_path.insert(0, Refuse())
"""


def torchweft(
    *arguments,
    tmp_path,
    without=(),
    error="ModuleNotFoundError(f'No module named {name!r}')",
    module="torchweft",
):
    """Run the command where some packages are missing (or broken in another way)."""
    (tmp_path / "sitecustomize.py").write_text(REFUSE.format(names=set(without), error=error))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )


def states(answer):
    """state by subject, from the doctor's lines."""
    lines = [line for line in answer.stdout.splitlines() if line and not line.startswith(" ")]
    return {line[:15].strip(): line[16:24].strip() for line in lines}


def test_doctor_on_a_healthy_machine_without_gpu(tmp_path):
    answer = torchweft("doctor", tmp_path=tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = states(answer)
    assert found["torchweft"] == found["torch"] == "ok"
    assert found["gpu"] == "missing"
    assert found["torch path"] == "ok"
    assert found["triton path"] == "missing"
    assert "triton serves GPU tensors, these are on cpu\n" in answer.stdout
    assert answer.stdout.endswith("torchweft is ready; what is missing is optional\n")


def test_doctor_without_triton_and_numba_says_how_to_get_them(tmp_path):
    answer = torchweft("doctor", tmp_path=tmp_path, without=["triton", "numba"])
    assert answer.returncode == 0, answer.stdout + answer.stderr
    found = states(answer)
    assert found["triton"] == found["numba"] == "missing"
    assert found["triton path"] != "ok"
    assert found["numba path"] != "ok"
    assert found["torch path"] == "ok"
    assert 'pip install "triton>=3.6"' in answer.stdout
    assert "pip install numba" in answer.stdout


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("ModuleNotFoundError(f'No module named {name!r}')", "missing"),
        ("OSError('libcudart.so.13: cannot open shared object file')", "broken"),
    ],
)
def test_doctor_without_torch_still_reports(tmp_path, error, state):
    answer = torchweft("doctor", tmp_path=tmp_path, without=["torch"], error=error)
    assert answer.returncode == 1
    found = states(answer)
    assert found["torch"] == state
    for what in ("gpu", "torch path", "numba path", "triton path"):
        assert found[what] == "missing"
    last = answer.stdout.splitlines()[-1]
    assert last.startswith(f"torchweft cannot be used here: torch is {state}. To do: ")
    assert last.endswith('pip install "torch>=2.11"')
    assert "report" not in answer.stdout
    assert "Traceback" not in answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["--version"], f"torchweft {__version__}\n"),
        (["--help"], "usage: torchweft [-h] [--version] command"),
        (["doctor", "--help"], "usage: torchweft doctor [-h]"),
        (["demo", "--help"], "usage: torchweft demo [-h] [--points FILE] [--key KEY]"),
        (["inspect", "--help"], "usage: torchweft inspect [-h] [--key KEY]"),
    ],
)
def test_help_and_version_need_no_package(tmp_path, words, begin):
    packages = ["torch", "numpy", "triton", "numba", "matplotlib", "ase", "laspy", "rich", "scipy"]
    answer = torchweft(*words, tmp_path=tmp_path, without=packages)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(begin)
    assert answer.stderr == ""


def test_help_of_compat_names_the_libraries(tmp_path):
    """Red before: it was an error, that help is no library."""
    module = "torchweft.compat"
    answer = torchweft("--help", tmp_path=tmp_path, without=["torch", "numpy"], module=module)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("`python -m torchweft.compat NAME… -- script.py args…`")
    assert answer.stdout.endswith(
        "Names: MinkowskiEngine, pykeops, spconv, torch_scatter, torchsparse\n"
    )


@pytest.mark.parametrize(
    ("package", "version", "text"),
    [
        ("torch", "2.13.0+cpu, CPU build", "tested"),
        ("triton", "3.9.0", "tested"),
        ("triton", "3.10.1", "not tested (3.6 to 3.9 are)"),
        ("torch", "2.9.1", "not tested (2.11 to 2.13 are)"),
    ],
)
def test_doctor_says_which_versions_are_tested(package, version, text):
    assert doctor._tested(package, version) == text


def test_doctor_says_when_launches_are_slow(monkeypatch):
    assert doctor._launches().text.startswith("fast")
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "3.9.0")
    found = doctor._launches()
    assert found.text.startswith("by triton 3.9.0 itself: the same results")
    assert "install triton 3.6" in found.advice


def test_errors_are_one_line(capsys, monkeypatch):
    def fail(options, rest):
        raise ShapeError("x is 1: it must be 2. Pass 2.")

    monkeypatch.setattr(cli, "_doctor", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "torchweft doctor: x is 1: it must be 2. Pass 2.\n"


def test_without_torch_other_commands_point_to_the_doctor(tmp_path):
    answer = torchweft("inspect", "cloud.npy", tmp_path=tmp_path, without=["torch"])
    assert answer.returncode == 1
    assert answer.stderr.startswith("torchweft inspect: No module named 'torch'")
    assert "run `torchweft doctor`" in answer.stderr


def test_without_a_command_it_lists_them(capsys):
    assert cli.main([]) == 2
    listed = capsys.readouterr().err
    for command in ("doctor", "demo", "inspect"):
        assert f"\n    {command} " in listed


@pytest.mark.parametrize(
    ("name", "main"),
    [
        ("torchweft demo", lambda *options: cli.main(["demo", *options])),
        ("benchmarks", lambda *options: benchmarks.main(options)),
        ("check", lambda *options: check.main(["products", *options])),
    ],
)
@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_refused(name, main, device, capsys):
    """Seen red with: torch.device of whatever is given, whose error is a traceback."""
    assert main("--device", device) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{name}: --device is {device}: it must be one that torch")
    assert said.endswith("Pass one of these; `torchweft doctor` says what this machine has.\n")


def test_unknown_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--quickly"])
    assert "unrecognized arguments: --quickly" in capsys.readouterr().err


def test_demo_takes_its_own_arguments(monkeypatch):
    taken = []
    monkeypatch.setattr("torchweft.demo.main", taken.append)
    assert cli.main(["demo", "--points", "cloud.npy"]) == 0
    assert taken == [["--points", "cloud.npy"]]


def test_benchmarks_write_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)
    arguments = ["sizes", "--case", "inner 1KB", "--device", "cpu", "--no-peers"]
    assert benchmarks.main([*arguments, "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "cpu" / "products.jsonl").read_text().splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["forward", "forward+backward"]
    assert capsys.readouterr().out.count("inner 1KB") == 2


def test_benchmarks_resume_and_stop_in_time(tmp_path, monkeypatch, capsys):
    """Seen red with rows of another commit that count, and with a case begun after the end."""
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)
    path = tmp_path / "cpu" / "products.jsonl"
    words = ["sizes", "--case", "inner 1KB", "--device", "cpu", "--no-peers", "--resume"]

    def lines_after(commit, *options):
        monkeypatch.setenv("TORCHWEFT_COMMIT", commit)
        assert benchmarks.main([*words, "--out", str(tmp_path), *options]) == 0
        return len(path.read_text().splitlines()) if path.exists() else 0

    assert lines_after("aaaa", "--seconds", "0") == 0
    assert "sizes: 1 cases are left: call again with --resume\n" in capsys.readouterr().err
    assert lines_after("aaaa") == 2
    assert lines_after("aaaa") == 2
    assert lines_after("bbbb") == 4
    assert capsys.readouterr().err.count("sizes: 0 of 1 cases to measure\n") == 1


def test_all_suites_of_a_machine_are_one_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.harness.runner.BUDGET_S", 0.001)
    words = ["all", "--device", "cpu", "--no-peers", "--out", str(tmp_path), "--case"]
    assert benchmarks.main([*words, "linear_scalars_200"]) == 0
    assert {path.name for path in (tmp_path / "cpu").iterdir()} == {"o3.jsonl"}
    assert benchmarks.main([*words, "inner 1KB"]) == 1  # which is of a GPU's suites
    assert (
        "no case of a suite for cpu has 'inner 1KB' in its name: the suites are clifford_cpu, "
        "cpu, o3_cpu, reductions_cpu, voxels_cpu. Name one of these, to see its cases."
    ) in capsys.readouterr().err
