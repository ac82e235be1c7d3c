"""Trace: from an unmodified model to its graph, by running it once on meta tensors.

In: a model on the meta device, example inputs, a loss. Out: a `ModelGraph`; `Opaques`, the modules that run whole and
stand as one operator; what the forward calls, to be compared on ranks; where a forward leaves tensors behind.

Imports: core, layouts, torch_internals.
"""
