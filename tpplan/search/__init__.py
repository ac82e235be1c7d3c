"""Search: the fastest plan of a model on a cluster, with a certificate.

In: what a caller of `tpplan.solve` asks. Out: a proven `Plan` and a bound on every other; or why there is none and what
would help. Points (mesh and micro-batch) are bounded and solved, the best is proven, counterexamples are cut away.

Imports: apply, core, costs, experts, layouts, machine, plan, prove, solvers, torch_internals, trace.
"""
