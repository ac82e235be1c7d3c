"""Answers: what a model's code is told when it asks something that tensors without data, on the planning machine, do
not know.

In: a question of the code (which device, which value, how many elements). Out: the answer that the code would get on
ranks; where there is none, an error, after which the module that asks runs whole; in a graph, the dims whose size data
decides. Errors of tpplan's own code are told apart from errors of the model's code here, too.

Imports: core, machine, torch_internals; trace/hooks.
"""
