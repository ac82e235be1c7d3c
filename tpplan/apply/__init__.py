"""Apply: puts a plan on an eager model, in place, with DTensor and FSDP2.

In: a model, on the meta device or with values, and a `Plan`. Out: the same model object. Its parameters are DTensors,
its modules convert the layouts of their inputs and outputs, planned modules recompute, and its first step is checked.

Imports: core, experts, plan, stages, torch_internals, trace.
"""
