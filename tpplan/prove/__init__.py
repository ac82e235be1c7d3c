"""Prove: an applied plan is the same model.

In: a model and a plan with its assignment. Out: nothing, where the applied model, run as each rank on local shapes,
runs the model's ops on what the layouts say; else a `Counterexample` that names op and module.

Imports: apply, core, layouts, plan, torch_internals, trace.
"""
