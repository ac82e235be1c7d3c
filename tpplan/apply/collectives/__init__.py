"""Collectives: what moves between ranks in a step, forward and backward.

In: local tensors and process groups. Out: tensors redistributed from layout to layout, cross entropy over a sharded
vocabulary, gradients reduced over tensor-parallel ranks and averaged over data-parallel ones.

Imports: core, plan, torch_internals, trace.
"""
