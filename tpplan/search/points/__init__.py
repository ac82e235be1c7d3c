"""Points: a request, its meshes with micro-batches (the points), and the ILP of each point.

In: a model file or builder, a cluster, a batch, options. Out: a `Request`; `TraceCache` with a trace per micro-batch;
the points; `Cuts`, what proofs have forbidden; `PointSolver`, which prices, bounds and solves the ILP of a point.

Imports: core, costs, experts, layouts, machine, plan, prove, solvers, stages, torch_internals, trace.
"""
