"""Layouts: which ways there are to divide a model, and whether a plan's is consistent.

In: a `ModelGraph` and a number of tensor-parallel ranks. Out: the decision space (every op, boundary and reading of a
parameter with its strategies), pins on it, treatments of layers, and `typecheck`, which derives the layout of every
value from a plan alone. Needs no torch.

Imports: core, plan, solvers.
"""
