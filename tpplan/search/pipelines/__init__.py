"""Pipelines: the fastest plan of a model in stages, each of which is solved and proven as a model of its own.

In: a model, how many parts of the GPUs hold its stages, and how many stages each of them has. Out: a PipelinePlan,
which says where the model is cut, the mesh and the plan of each stage, the schedule, and what a step takes and holds.

Imports: core, costs, experts, layouts, machine, plan, solvers, stages, trace; search, search/models, search/points.
"""
