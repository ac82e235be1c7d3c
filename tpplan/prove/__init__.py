"""Prove: an applied plan is the same model.

In: a model and a plan with its assignment. Out: None where the applied model, run as a rank runs it on local shapes,
runs the model's own ops on the layouts' values; else a `Counterexample` that names op and module.

Imports: apply, core, layouts, plan, stages, torch_internals, trace.
"""
