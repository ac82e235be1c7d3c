"""Comparisons: many plans of one model, each by solving.

In: a problem, or a plan. Out: the plans without a choice that was made, the best of each kind, those an expert writes
by hand, and the smallest cluster that reaches a target.

Imports: core, layouts, machine, plan; search, search/models, search/points.
"""
