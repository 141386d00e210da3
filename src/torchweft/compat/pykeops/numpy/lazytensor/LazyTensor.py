"""Lazy tensors, for arrays of NumPy."""

from torchweft.reductions.numpy import ComplexLazyTensor, LazyTensor, Pm, Var, Vi, Vj

__all__ = ["ComplexLazyTensor", "LazyTensor", "Pm", "Var", "Vi", "Vj"]
