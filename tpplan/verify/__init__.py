"""Verify: a plan held against the model, without trusting what made it.

In: a plan and a model. Out: a proof renewed (`prove_plan`), or losses, gradients and collectives of real ranks compared
with one process; a step run on fake tensors, whose collectives and memory are counted; `tpplan doctor`.

Imports: apply, core, costs, layouts, machine, plan, prove, search, solvers, torch_internals, trace, train.
"""
