"""Stages of a pipeline: where a model may be cut, and the model as one stage runs it.

In: the graph of a model, and after which layers it is to be cut. Out: for each stage what of the model it has, and the
same model in which the modules of other stages are stubs. A stage is a model like any other: it is traced, solved,
proven and applied as one.

Imports: core, experts, plan, torch_internals, trace.
"""
