"""Straight-line code as numba's functions run it: each form against Python's own exec.

Seen red with: a counter that starts at 1, differences turned round.
"""

import numpy as np
import pytest

from tests.conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("loops do not depend on the interpreter", allow_module_level=True)

numba = pytest.importorskip("numba")
from torchweft.core.cpu.straight_line import straight_line  # noqa: E402

FORMS = {
    "loops": "for c in range(2):\n    for u in range(n):\n        y[c * 3 + u] = x[u] * x[u + 1]",
    "names": "a = 2.0 * x[0]\ny[0] = a - x[1]\na = a - 3.0\ny[1] = -a",
    "kept": "total = 0.0\nfor u in range(n):\n    total += x[u]\ny[2] = total",
    "added": "for u in range(n): y[u] += x[u] * shift",
    "less": "y[0] -= x[2]\ny[1] -= x[3] - x[0]",
    "called": "y[0] = doubled(x[1])\ny[1] = abs(x[0])",
    "integers": "y[FIRST + 1] = x[FIRST * 2 + 1]",
}
FIRST = 1


@numba.njit
def doubled(x):
    return x + x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype):
    """The numbers are small integers, so both compute without rounding."""
    x, y = np.array([-3, 5, 7, 2], dtype), np.arange(6).astype(dtype)
    expected, known = y.copy(), {"FIRST": FIRST, "doubled": doubled}
    exec(FORMS[form], {"x": x, "y": expected, "n": 3, "shift": 4.0, **known})
    code = straight_line(FORMS[form], "x, y, n, shift", known)

    @numba.njit
    def run(x, y, n, shift):
        code((x, y, n, shift))

    run(x, y, 3, dtype(4))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("text", ["if a: b = 1", "y[0] = x[0] ** 2.0", "y[0] = x[n % 2 ^ 1]"])
def test_other_forms_are_refused(text):
    code = straight_line(text, "x, y, n")

    @numba.njit
    def run(x, y, n):
        code((x, y, n))

    with pytest.raises(Exception, match=r"code holds .* none of its forms: .* Print one"):
        run(np.zeros(3), np.zeros(3), 3)
