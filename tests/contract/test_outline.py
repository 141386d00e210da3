"""Bodies of loops as functions: the module computes what it computed.

Seen red with: carried names forgotten, or not given; the loop's own number not given;
names that are new in the body given; constants given as numbers; loops in branches left alone;
unrolled loops taken.
"""

import ast
import types

import pytest

from torchweft.core.printing.modules import LONG, outlined

LINES = "\n".join(f"        t{n} = x * {n} + i" for n in range(LONG))

LOOP = f"""
@gluon.jit(do_not_specialize=['rows'])
def kernel(x, rows, WIDE: tl.constexpr):
    STEP: tl.constexpr = WIDE + 1
    total = x - x
    last = total
    for i in range(0, rows, STEP):
{LINES}
        if t3 % 2 > 0:
            last = t2
        total += t{LONG - 1} * WIDE
    last = last * 2
    return total, last
"""

NESTED = f"""
@gluon.jit
def kernel(x, rows, WIDE: tl.constexpr):
    place, sums, i = 0, 0, 3
    if rows > 2:
        while place < rows:
            own = place * x
            for j in range(place, rows):
{LINES.replace("        t", "                t")}
                sums += own * j + t{LONG - 1}
            sums = sums - own
            place = place + WIDE
    return sums, place
"""

SHORT = """
@gluon.jit
def kernel(x, rows, WIDE: tl.constexpr):
    total = x
    for i in range(rows):
        total += i * WIDE
    return total
"""

UNROLLED = f"""
@gluon.jit
def kernel(x, rows, WIDE: tl.constexpr):
    total = x
    for i in tl.static_range(3):
{LINES}
        total += t{LONG - 1}
        for j in range(rows):
{LINES.replace("        t", "            s")}
            total += s{LONG - 1} * i * j
    return total
"""

TEXTS = {"a loop": LOOP, "nested": NESTED, "short": SHORT, "unrolled": UNROLLED}


def run(text, *arguments):
    """What the kernel of a text returns, as Python."""

    def jit(function=None, **_):
        return function or (lambda given: given)

    tl = types.SimpleNamespace(constexpr=int, static_range=range)
    module = {"gluon": types.SimpleNamespace(jit=jit), "tl": tl}
    exec(text, module)
    return module["kernel"](*arguments)


def long_loops(text):
    """Loops that Triton would visit twice."""
    every = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.For | ast.While))
    return [n for n in every if len(n.body) >= LONG and "static" not in ast.unparse(n)]


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize("name", TEXTS)
def test_same_results(name, rows):
    text = outlined(TEXTS[name])
    assert run(text, 5, rows, 2) == run(TEXTS[name], 5, rows, 2)
    assert bool(long_loops(TEXTS[name])) == (name != "short")
    assert not long_loops(text)


def test_what_functions_take():
    """Constants stay constants, and nothing is given that the body makes."""
    loop, kernel = ast.parse(outlined(LOOP)).body
    assert ast.unparse(loop.args) == "WIDE: tl.constexpr, i, last, total, x"
    assert ast.unparse(loop.decorator_list) == "gluon.jit"
    assert "last, total = kernel_loop0(WIDE, i, last, total, x)" in ast.unparse(kernel)


def test_unrolled_loops_stay():
    """Their numbers are constants of the loops in them."""
    loop, kernel = ast.parse(outlined(UNROLLED)).body
    assert ast.unparse(loop.args) == "i: tl.constexpr, j, total, x"
    assert len(kernel.body[1].body) > LONG
