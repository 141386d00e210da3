"""Enumerations of spconv's algorithms, which programs pass on; they have no effect here."""

from enum import Enum

__all__ = ["AlgoHint", "ConvAlgo"]


class ConvAlgo(Enum):
    """How spconv stores pairs; layers take it as `algo=` and keep it."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(Enum):
    """What a kernel of spconv was tuned for."""

    NoHint = 0
    Fowrard = 1  # spconv's spelling
    BackwardInput = 2
    BackwardWeight = 4
