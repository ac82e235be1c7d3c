"""Points: what is asked, and the ILPs that come of it.

In: a model file or builder, a cluster, a batch, options. Out: a `Request`; `TraceCache`, which has one trace per
micro-batch; the points (meshes with micro-batches); `Cuts`, what proofs have forbidden; `PointSolver`, which prices,
bounds and solves the ILP of a point.

Imports: core, costs, layouts, machine, plan, prove, solvers, torch_internals, trace.
"""
