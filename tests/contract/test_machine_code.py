"""Functions of machine code: each form against Python's own exec, and their files on disk.

Seen red with: a loop of two limits that runs at least once, rows of an array that follow each other
without its width, code that is read though its text has changed; where with its values turned
about, names that are written before both numbers are read.
"""

import math

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.core import files
from torchweft.errors import DTypeError
from torchweft.testing.bounds import assert_as_accurate
from torchweft.testing.contract import assert_same_bits

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
    "two names": "a, b = y[1], y[2]\na, b = b, a + b\ny[0] = a\ny[3] = b",
    "sums": "total = 0.0\nfor k in range(0, n):\n    total += x[rows[k], k]\ny[0] = total",
    "steps": "for k in range(1, rows[1] + 3, 3): y[k] = 0.5 / 2.0",
    "limited": "y[min(n, rows[0])] = -1.0\ny[max(n, rows[0]) - 1] = -2.0",
    "if": "if x[0, 1] >= 1.0: y[0] = 9.0\nif n != 2: y[1] = 9.0\nif n < 3: y[2] = 9.0",
    "while": "k = n - 2\nwhile k < 5 and (y[k] < 2.0 or k == 2):\n    y[k] -= 1.0\n    k += 1",
    "either": "for k in range(0, 5): y[k] = (x[0, 1] if y[k] <= 4.0 else -y[k])",
    "functions": "y[0] = sqrt(abs(0.0 - y[4] * y[2] / y[1])) + floor(2.5) + round(2.5)",
    "infinity": "y[0] = (1.0 if y[4] < float('inf') else 0.0)",
    "integers": "for k in range(0, 3):\n    rows[k] = k * n\n    y[k] = x[rows[k] // n, 0]",
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
    names = {"sqrt": math.sqrt, "floor": math.floor}
    exec("from __future__ import annotations\n" + text, names)
    names["run"](*expected)
    machine_code(text)(*found)
    assert found[1].tolist() == expected[1].tolist()


OF_FLOAT64 = {
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": torch.exp,
    "step": lambda x: torch.where(x < 1, 0.0, 1.0),
    "positive": lambda x: torch.where(x > 1, x, 0.0),
    "third": lambda x: x / 3,
    "twice": lambda x: (x * x).sqrt() * 2,
}
DEFINED = """
def step(u): return where(u < 1.0, 0.0, 1.0)
def positive(v): return where(v > 1.0, v, 0.0)
def third(t): return 0.3333333333333333 * t
def square(w):
    product = w * w
    return product
def twice(s):
    root = sqrt(square(s))
    return root + root
"""


@pytest.mark.parametrize("name", OF_FLOAT64)
def test_functions_of_float32_in_float64(name):
    """Numbers are wide where that is asked for; results are rounded once."""
    head = "def run(n: int64, x: float32[:], y: float32[:]):\n"
    body = f"    for k in range(0, n): y[k] = {name}(float64(x[k]))\n"
    code = machine_code(f"{DEFINED}{head}{body}", wide=True)
    x = torch.linspace(0, 3, 9)
    y, exact = torch.empty(9), OF_FLOAT64[name](x.double()).float()
    code(9, x, y)
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


@pytest.mark.parametrize(
    "form", ["while n: y[0] = 1.0", "y[0] = x[0, 0] ** 2.0", "for k in range(n): k = n + 1"]
)
def test_other_forms_are_refused(form):
    with pytest.raises(ValueError, match=r"code holds .* none of its forms: .* Print one"):
        machine_code(defined(form))


def test_functions_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"calls 'erf', which is none of .* call one of these"):
        machine_code(defined("y[0] = erf(y[1])"))


def values_of(name, x):
    kind = str(x.dtype).removeprefix("torch.")
    code = machine_code(
        f"def run(x: {kind}[:], y: {kind}[:], n: int64):\n"
        f"    for k in range(n): y[k] = {name}(x[k])\n"
    )
    y = torch.empty_like(x)
    code(x, y, len(x))
    return y


@pytest.mark.parametrize("name", ["log", "sin", "cos", "asin", "acos", "atan", "floor", "round"])
def test_functions(name):
    x = torch.tensor([0.3, 0.9, 1.0, 0.5])
    exact = getattr(torch, name)(x.double())
    plain = getattr(torch, name)(x)
    assert_as_accurate(values_of(name, x), exact, (plain.double() - exact).abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_powers_of_two(dtype):
    """Seen red with: a bias less one."""
    normal = round(math.log2(torch.finfo(dtype).tiny))
    n = torch.arange(normal, 2 - normal)
    assert_same_bits(values_of("exp2", n.to(dtype)), 2 ** n.to(dtype), "powers")
    special = torch.tensor([normal - 1, -math.inf, 2 - normal, math.inf], dtype=dtype)
    assert values_of("exp2", special).tolist() == [0, 0, math.inf, math.inf]
    assert values_of("exp2", torch.tensor([-math.nan, math.nan], dtype=dtype)).isnan().all()
    x = torch.linspace(-0.75, 0.75, 61, dtype=dtype)
    exact = torch.tensor([math.exp2(v) for v in x.tolist()], dtype=torch.float64)
    assert_as_accurate(values_of("exp2", x), exact, torch.finfo(dtype).eps / 2 * exact)


def test_numbers_of_two_dtypes():
    """A sum in float64 of float32 terms, rounded where it is stored."""
    code = machine_code(
        "def run(x: float32[:], total: float64[:], y: float32[:]):\n    s = float64(0.0)\n"
        "    for k in range(3): s += x[k]\n    total[0] = s\n    y[0] = float32(s) + s\n"
    )
    x, total, y = torch.tensor([1.0, 2**-30, 2**-30]), torch.zeros(1).double(), torch.zeros(1)
    code(x, total, y)
    assert total.item() == 1 + 2**-29
    assert y.item() == 2


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
