"""The text of kernels that mix copies: blocks that differ in numbers alone share their code.

Seen red with: a code for each block.
"""

from torchweft.o3 import Irreps
from torchweft.o3.layers.linear import Linear
from torchweft.o3.mixing.source import direct_source

IRREPS = Irreps("16x0e + 16x1o + 16x2e + 16x3o")


def test_blocks_of_few_rows_that_are_alike_have_one_code():
    for layout, count in (("ir_mul", 1), ("mul_ir", 4)):  # there copies lie 2l + 1 apart
        for result in "zt":
            text = direct_source(Linear(IRREPS, IRREPS, layout=layout).mixing, result, 2)
            assert text.count("= accumulate(") == count
