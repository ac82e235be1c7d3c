"""Anatomy: the step of a plan pulled apart, for a page to draw.

In: a plan and its model. Out: an `Anatomy`: when what runs on which stream, what memory holds meanwhile, and what the
best plan would be with more GPUs, another batch, length or memory. The numbers are those that price a plan.

Imports: core, costs, layouts, machine, plan, search, solvers, stages, trace.
"""
