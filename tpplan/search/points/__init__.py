"""Points: a request, its meshes with micro-batches (the points), and the ILP of each point.

In: a model's traces, a cluster, a batch, options. Out: a `Request`; the points; `Cuts`, what proofs have forbidden;
`PointSolver`, which prices, bounds and solves the ILP of a point.

Imports: core, costs, layouts, machine, plan, solvers, stages, trace; search/models.
"""
