"""Trace: from an unmodified model to its graph, by running it once on meta tensors.

In: a model, example inputs, a loss. Out: a `ModelGraph`; `Opaques`, the modules that run whole, each as one operator;
what each module's forward calls, to compare ranks by; tensors that a forward leaves behind for others to read.

Imports: core, experts, layouts, stages, torch_internals.
"""
