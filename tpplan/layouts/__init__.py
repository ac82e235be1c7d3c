"""Layouts: the ways to shard a model, and whether a plan's layouts are consistent.

In: a `ModelGraph` and a number of tensor-parallel ranks. Out: the decision space (every op, boundary and reading of a
parameter with its strategies), pins, treatments of layers (recomputation, resharding), and `typecheck`, which derives
the layout of every value from a plan alone. Needs no torch.

Imports: core, plan, solvers.
"""
