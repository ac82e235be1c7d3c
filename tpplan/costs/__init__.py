"""Costs: seconds and bytes of each strategy of each decision.

In: a decision space and a profile. Out: per strategy the time of its kernels (ops run on meta tensors of local shapes)
and collectives with error bars, the bytes that autograd saves, and the moments of a layer at which memory may peak.

Imports: apply, core, layouts, machine, plan, solvers, torch_internals, trace.
"""
