"""Functions of machine code: each form against Python's own exec, and their files on disk.

Seen red with: a loop of two limits that runs at least once, rows of an array that follow each other
without its width, code that is read though its text has changed; where with its values turned
about, names that are written before both numbers are read.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.core import files
from torchweft.errors import DTypeError

if INTERPRETED:
    pytest.skip("loops do not depend on the interpreter", allow_module_level=True)

pytest.importorskip("llvmlite")
from torchweft.core.cpu import machine_code as compiler
from torchweft.core.cpu.machine_code import machine_code

HEAD = "def run({}):\n    {}"
ARGUMENTS = "x: {0}[:, :], y: {0}[:], rows: {1}[:], n: int64"
FORMS = {
    "rows": "for k in range(0, 3):\n    row = rows[k]\n    for u in range(n): y[u] += x[row, u]",
    "no runs": "for k in range(rows[1], rows[1]): y[k] = x[0, k]",
    "limits": "for k in range(rows[0], rows[1]): y[k] = 2.0 * x[1, k] - y[k]",
    "names": "a = x[0, 1]\na += 1.0\nend = rows[1] + n * 1\ny[end] = -a",
    "parts": "for k in range(0, 4): y[k] = x[k // n, k % n]",
    "quotients": "for k in range(0, n): y[k] = x[0, k] / 2.0",
    "two names": "a, b = y[1], y[2]\na, b = b, a + b\ny[0] = a\ny[3] = b",
    "sums": "total = 0.0\nfor k in range(0, n):\n    total += x[rows[k], k]\ny[0] = total",
}


def defined(form, dtype="float64", index="int64"):
    body = FORMS.get(form, form).replace("\n", "\n    ")
    return HEAD.format(ARGUMENTS.format(dtype, index), body) + "\n"


def given(dtype=torch.float64, index=torch.int64):
    x = torch.arange(6).to(dtype).view(3, 2)
    return x, torch.arange(5).to(dtype) ** 2, torch.tensor([0, 2, 2]).to(index), 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, index, dtype):
    """The numbers are small integers, so both compute without rounding."""
    text = defined(form, dtype, index)
    found, expected = (given(getattr(torch, dtype), getattr(torch, index)) for _ in range(2))
    names = {}
    exec("from __future__ import annotations\n" + text, names)
    names["run"](*expected)
    machine_code(text)(*found)
    assert found[1].tolist() == expected[1].tolist()


FUNCTIONS = {
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": torch.exp,
    "step": lambda x: torch.where(x < 1, 0.0, 1.0),
    "positive": lambda x: torch.where(x > 1, x, 0.0),
    "square": lambda x: x * x,
    "twice": lambda x: (x * x).sqrt() * 2,
}
DEFINED = """
def step(u): return where(u < 1.0, 0.0, 1.0)
def positive(v): return where(v > 1.0, v, 0.0)
def square(w):
    product = w * w
    return product
def twice(s):
    root = sqrt(square(s))
    return root + root
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_float32_in_float64(name):
    """Numbers are float64 where an array is; results are rounded once."""
    head = "def run(n: int64, room: float64[:], x: float32[:], y: float32[:]):\n"
    code = machine_code(f"{DEFINED}{head}    for k in range(0, n): y[k] = {name}(x[k])\n")
    x = torch.linspace(0, 3, 9)
    y, exact = torch.empty(9), FUNCTIONS[name](x.double()).float()
    code(9, torch.empty(1).double(), x, y)
    assert ((y - exact).abs() <= torch.finfo(torch.float32).eps * exact.abs()).all()


def test_tables_of_arrays():
    code = machine_code(
        "def run(tables: float32[:][:], z: float32[:]):\n    for k in range(0, 2):\n"
        "        x = tables[k]\n        z[k] = x[1]\n"
    )
    arrays, z = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], torch.zeros(2)
    code(torch.tensor([t.data_ptr() for t in arrays]), z)
    assert z.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (0, torch.zeros(3, 2)),
        (0, torch.zeros(6).double()),
        (0, torch.zeros(2, 3).double().T),
        (2, torch.tensor([0, 2, 2]).int()),
    ],
)
def test_tensors_of_another_kind_are_refused(place, wrong):
    arguments = list(given())
    arguments[place] = wrong
    with pytest.raises(DTypeError, match=r"was given to machine code, which needs .* convert it"):
        machine_code(defined("rows"))(*arguments)


@pytest.mark.parametrize("form", ["while n: y[0] = 1.0", "y[0] = tan(2.0)", "y[n - 1] = 1.0"])
def test_other_forms_are_refused(form):
    with pytest.raises(ValueError, match=r"code holds .* none of its forms: .* Print one"):
        machine_code(defined(form))


@pytest.mark.parametrize("kind", ["x", "x: float64", "x: float16[:]", "x: float64[:, :, :]"])
def test_arguments_without_a_kind_are_refused(kind):
    with pytest.raises(ValueError, match="of machine code has no kind: write int64, or a dtype"):
        machine_code(f"def run({kind}): x[0] = 1.0")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """How often a text was compiled; files are in a folder of the test's own."""
    monkeypatch.setenv("TORCHWEFT_CACHE_DIR", str(tmp_path))
    times, plain = [], compiler._compiled
    monkeypatch.setattr(compiler, "_compiled", lambda *a: times.append(1) or plain(*a))
    return times


def again(form):
    """A call as in another process."""
    machine_code.cache_clear()
    arguments = given()
    machine_code(defined(form))(*arguments)
    return arguments[1].tolist()


def test_code_is_found_on_disk(compiled):
    first = again("rows")
    assert again("rows") == first
    assert len(compiled) == 1
    assert again("limits") != first
    assert len(compiled) == 2


def test_damaged_code_is_compiled_again(compiled):
    first = again("rows")
    (path,) = (files.home() / "machine").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert again("rows") == first
    assert again("rows") == first
    assert len(compiled) == 2
