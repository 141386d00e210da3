"""Formula strings: what they mean, and what their errors say.

Seen red with: an alias without a position taken as variable 0, `|` bound tighter than `+`, lists
read as integers, and operations found in other capitals.
"""

import math

import pytest

from torchweft.errors import IndexRangeError, ShapeError
from torchweft.reductions.formula.derivatives import (
    diff,
    divergence,
    grad_matrix,
    gradient,
    laplacian,
)
from torchweft.reductions.formula.named import operations
from torchweft.reductions.formula.node import const, node, var, zeros
from torchweft.reductions.formula.parse import (
    Declaration,
    FormulaError,
    parse,
    parse_aliases,
    parse_variable,
)

COMPOSED = operations()

x, y, b = var(0, 3, 0), var(1, 3, 1), var(2, 2, 1)
g, e = var(3, 1, 2), var(4, 2, 0)
ALIASES = ["x = Vi(3)", "y=Vj(1,3)", "b = Vj(2)", "  g =Pm( 3 , 1 )", "e = Var(4, 2, 0)"]
distance = node("sqdist", x, y)
gauss = node("exp", -distance / g) * b


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Var(0,3,0)", x),
        ("Vi(0, 3) + Vj(1, 3)", x + y),
        ("Pm(3,1)", g),
        ("x+y*2-1", x + 2 * y - 1),
        ("-x", -x),
        ("+x", x),
        ("--x", x),
        ("2*(x-y)/3", 2 * (x - y) / 3),
        ("1/g", 1 / g),
        ("IntInv(9)", const(1 / 9)),
        ("RatCst(2,3)*g", const(2 / 3) * g),
        ("IntCst(-2)", const(-2)),
        ("Zero(3)", zeros(3)),
        ("0.1*x + 1e-3", 0.1 * x + 1e-3),
        ("x**2", node("pow", x, data=2)),
        ("x**-1", node("reciprocal", x)),
        ("x**0.5", node("sqrt", x)),
        ("x**-0.5", node("rsqrt", x)),
        ("x**g", node("powf", x, g)),
        ("2**x", node("powf", const(2), x)),
        ("-x**2", -node("pow", x, data=2)),
        ("(x|y)", COMPOSED["|"](x, y)),
        ("x|y+x", COMPOSED["|"](x, y + x)),
        ("x<=y", node("less_equal", x, y)),
        ("x>2", node("less", const(2), x)),
        ("x==y", node("equal", x, y)),
        ("Exp(-SqDist(x,y)/g)*b", gauss),
        (" Exp(\n  -SqDist(x, y)\n  / g) * b ", gauss),
        ("Elem(x, 1)", COMPOSED["Elem"](x, 1)),
        ("ElemT(g, 4, 2)", COMPOSED["ElemT"](g, 4, 2)),
        ("Pow((x|y),2)*((Elem(e,0)*x)+(Elem(e,1)*y))",
         node("pow", COMPOSED["|"](x, y), data=2)
         * (COMPOSED["Elem"](e, 0) * x + COMPOSED["Elem"](e, 1) * y)),
        ("Concat(x, y, g)", node("concat", x, y, g)),
        ("Clamp(x, 0, g)", COMPOSED["Clamp"](x, const(0), g)),
        ("ClampInt(x, 0, 2)", COMPOSED["ClampInt"](x, 0, 2)),
        ("Mod(x, 2)", COMPOSED["Mod"](x, const(2))),
        ("Round(x, 2)", node("round", x, data=2)),
        ("Sum(x)*SumT(g,3)", node("sum", x) * node("expand", g, data=3)),
        ("TensorDot(x,y,Ind(3),Ind(3),Ind(0),Ind(0))", COMPOSED["|"](x, y)),
        ("TensorDot(x, b, [3], [2], [], [], [1, 0])",
         node("einsum", x, b, data=((3,), "a", (2,), "b", "ba"))),
        ("Kron(x, b, (3, 1), [1, 2])", COMPOSED["TensorProd"](x, b)),
        ("MatVecMult(TensorProd(x,b), b)", COMPOSED["MatVecMult"](COMPOSED["TensorProd"](x, b), b)),
        ("SoftDTW_SqDist(x, y, g)", COMPOSED["SoftDTW_SqDist"](x, y, g)),
        ("Grad(Exp(-SqDist(x,y)/g)*b, x, e)", gradient(gauss, x, e)),
        ("Grad_WithSavedForward(Exp(-SqDist(x,y)/g)*b, x, e, Var(5,2,0))", gradient(gauss, x, e)),
        ("Grad(Grad(x + Var(1,3,1), x, Var(5,3,0)), x, Var(6,3,0))", zeros(3)),
        ("Diff(SqDist(x,y), x, y)", diff(distance, x, y)),
        ("GradMatrix(b*g, g)", grad_matrix(b * g, g)),
        ("Divergence(x*g, x)", divergence(x * g, x)),
        ("Laplacian(SqDist(x,y), x)", laplacian(distance, x)),
        ("TraceOperator(x*g, x)", 3 * g),
        ("Factorize(x*g, g)", x * g),
        ("ComplexReal(Real2Complex(x))", x),
    ],
)  # fmt: skip
def test_strings(text, expected):
    assert parse(text, parse_aliases(ALIASES)) is expected


def test_names_are_what_the_caller_says():
    assert parse("K * b", {"K": node("exp", -distance), "b": b}) is node("exp", -distance) * b


def test_every_operation_is_known():
    for name in COMPOSED:
        if name.isidentifier():
            with pytest.raises((FormulaError, ShapeError), match=f"{name}|expand"):
                parse(f"{name}()" if name != "Concat" else "Concat(Exp())")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = Vi(3)", Declaration("x", None, 3, 0)),
        ("x=Vj(0,3)", Declaration("x", 0, 3, 1)),
        ("Pm(12)", Declaration(None, None, 12, 2)),
        ("Var(4, 2, 1)", Declaration(None, 4, 2, 1)),
        ("x_2 = Var(4,2,1)", Declaration("x_2", 4, 2, 1)),
    ],
)
def test_variables(text, expected):
    assert parse_variable(text) == expected


@pytest.mark.parametrize(
    "text", ["x", "x = V(3)", "3x = Vi(3)", "x = Vi()", "x = Vi(a)", "x = Var(3)", "Vi(1,2,3)", ""]
)
def test_variables_that_do_not_read(text):
    with pytest.raises(FormulaError, match=r"must read like 'x = Vi\(3\)'"):
        parse_variable(text)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("Exp(-SqDist(x,yy))", FormulaError, "unknown name 'yy' at position 14 .* or write 'y'"),
        ("2*é", FormulaError, "unknown name 'é' at position 2 .*variables are b, e, g, x, y"),
        ("é+exp(x)", FormulaError, "unknown name 'é' at position 0"),
        ("x*exp(y)", FormulaError, "unknown operation 'exp' at position 2 .* or write 'Exp'"),
        ("x*é(y)", FormulaError, "unknown operation 'é' at position 2"),
        ("x + Exp", FormulaError, "bare operation 'Exp' at position 4 .* it needs arguments"),
        ("x[0]", FormulaError, r"'x\[0\]' at position 0 "),
        ("x @ y", FormulaError, "'x @ y' at position 0 .* named operations"),
        ("0 < x < 1", FormulaError, "'0 < x < 1' at position 0"),
        ("x and y", FormulaError, "'x and y' at position 0"),
        ("True*x", FormulaError, "'True' at position 0"),
        ("x.exp()", FormulaError, r"unknown operation 'x\.exp' at position 0"),
        ("Elem(x)", FormulaError, r"1 arguments of Elem at position 0 .* takes \(f, index\)"),
        ("Elem(x,g)", FormulaError, "'g' at position 7 .* an integer must stand there"),
        ("Elem(x,1.5)", FormulaError, "'1.5' at position 7"),
        ("Elem(x,index=1)", FormulaError, "keywords in Elem at position 0"),
        ("x +", FormulaError, "syntax error at position 3 "),
        ("Exp(x", FormulaError, "syntax error at position 3 "),
        ("", FormulaError, "syntax error at position 0"),
        ("x; y", FormulaError, "syntax error at position 1"),
        ("Var(0,2,0) + x*2 + y", ShapeError, r"2 and 3.* \+ at position 0 of the formula"),
        ("g * SqDist(x, b)", ShapeError, "3 and 2.* SqDist at position 4 "),
        ("Elem(x, 5)", IndexRangeError, "5 to 6 .* Elem at position 0 "),
        ("Var(0,1,0)*g*Sum(x)", FormulaError, r"Var\(0, 1, 0\) and Var\(0, 3, 0\)"),
    ],
)
def test_errors_say_where_and_what_to_do(text, error, message):
    with pytest.raises(error, match=message) as found:
        parse(text, parse_aliases(ALIASES))
    assert text in str(found.value)
    assert found.value.__cause__ is None


def test_a_name_declared_twice():
    with pytest.raises(FormulaError, match="'x' twice"):
        parse_aliases(["x = Vi(3)", "x = Vj(3)"])


def test_numbers_keep_all_their_digits():
    assert parse("3.141592653589793") is const(math.pi)
    assert parse("1/3") is const(1 / 3)
