"""Collectives: the communication between ranks in a training step, forward and backward.

In: local tensors and process groups. Out: tensors converted from layout to layout, cross entropy over a sharded
vocabulary, gradients reduced over tensor-parallel ranks and averaged over data-parallel ranks.

Imports: core, plan, torch_internals, trace.
"""
