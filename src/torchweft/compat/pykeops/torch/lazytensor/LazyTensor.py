"""Lazy tensors, for tensors of torch."""

from torchweft.reductions import ComplexLazyTensor, LazyTensor, Pm, Var, Vi, Vj

__all__ = ["ComplexLazyTensor", "LazyTensor", "Pm", "Var", "Vi", "Vj"]
