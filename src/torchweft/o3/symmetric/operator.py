"""The operator of symmetric contractions in one kernel: gradients of any order are programs again.

    torchweft::o3_symmetric(Tensor[] tensors, str program, str layout, str mixed) -> Tensor[]

Tensors are the program's, (N, D) for x and z, and in place of weights the parameters that they are
made of, (elements, couplings, C) each; then each row's element and the rows by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchweft.core.explain import record_cost, recording
from torchweft.core.operators.operator import compiling
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    ProgramRule,
    Rest,
    Results,
    Tensors,
)
from torchweft.errors import ShapeError
from torchweft.o3.backends import executor
from torchweft.o3.channelwise.operator import one_by_one
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.symmetric.program import (
    ELEMENT_TABLES,
    program_steps,
    slots,
    symmetric_program,
    weight_counts,
)

__all__ = ["cached_symmetric_call", "contract_symmetric"]


def cached_symmetric_call(name: str, layout: str, mixed: str) -> Rest:
    """Non-tensor arguments of `contract_symmetric`, cached for one signature of its tensors.

    They are strings while torch.compile traces.

    Args:
        name: the key of a program.
        layout: of the rows of x and z.
        mixed: how weights are made of parameters, see torchweft.o3.symmetric.program.
    """
    rest = (name, layout, mixed)
    return rest if compiling() else CachedCall(rest, 1 + len(weight_counts(mixed)), _prepared)


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    made: Callable[[Tensors], Results]
    made = executor("symmetric", "triton").prepared(*rest, tensors)
    return made


class SymmetricRule(ProgramRule):
    """Results of a program and its derivatives."""

    def inputs(self, rest: Rest) -> Sequence[int]:
        """Weights are all parameters."""
        return self._sizes(slots(rest[0]).inputs, rest)

    def outputs(self, rest: Rest, count: int) -> Sequence[int]:
        """Their gradients are those of all parameters."""
        return self._sizes(slots(rest[0]).outputs, rest)

    def _sizes(self, letters: str, rest: Rest) -> Sequence[int]:
        many = len(weight_counts(rest[2]))
        return [many if slot == "w" else 1 for slot in letters]

    def body(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        """The results on real tensors."""
        results = _prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(
                moved, program_steps(rest[0]) * len(tensors[-ELEMENT_TABLES]) * tensors[1].shape[2]
            )
        return list(results)

    def fake(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        """Empty tensors of their shapes."""
        x, parameters = tensors[0], tensors[1 : 1 + len(weight_counts(rest[2]))]
        outs = sum(ir.dim for _, ir in Irreps(rest[0].split(" ")[1]))
        rows = {
            "x": [x],
            "w": parameters,
            "z": [x.new_empty(x.shape[0], outs * parameters[0].shape[2])],
        }
        likes = [like for slot in slots(rest[0]).outputs for like in rows[slot]]
        return [like.new_empty(like.shape) for like in likes]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        """The results of a mapped call, sample after sample."""
        if any(dim is not None for dim in dims[-ELEMENT_TABLES:]):
            raise ShapeError(
                "the elements of rows were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map x and weights only, or call once for each."
            )
        return one_by_one(call, size, dims, tensors, rest)


contract_symmetric = ListOperator(
    "o3_symmetric",
    "str program, str layout, str mixed",
    SymmetricRule(symmetric_program, ELEMENT_TABLES),
)
