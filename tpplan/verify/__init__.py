"""Verify: checks a plan against the model, without trusting the solver or the file that it came from.

In: a plan and a model. Out: the plan proven anew (`prove_plan`); losses, gradients and collectives of real ranks,
compared with one process; collectives and peak memory of a step on fake tensors; what works here (`tpplan doctor`).

Imports: apply, core, costs, experts, layouts, machine, plan, prove, search, solvers, stages, torch_internals, trace,
train.
"""
