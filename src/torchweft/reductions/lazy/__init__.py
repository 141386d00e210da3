"""Lazy tensors: formulas of all pairs (i, j), real or complex, computed when they are reduced."""

from torchweft.reductions.lazy.complex_tensors import ComplexLazyTensor
from torchweft.reductions.lazy.tensors import LazyTensor
from torchweft.reductions.lazy.variables import Pm, Var, Vi, Vj

__all__ = ["ComplexLazyTensor", "LazyTensor", "Pm", "Var", "Vi", "Vj"]
