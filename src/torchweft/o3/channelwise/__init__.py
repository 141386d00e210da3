"""Channelwise tensor products on graphs, in any mode: one form, closed under differentiation."""
