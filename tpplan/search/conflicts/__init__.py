"""Conflicts: of a counterexample, the choices that together make it, as few as possible.

In: a counterexample with its assignment, the ILP, and a check of assignments. Out: the choices, and like ones wherever
the same code sees them, to be forbidden together; the nearest assignment without them.

Imports: core, costs, layouts, prove, solvers, stages; search/points.
"""
