"""Experts: modules that map rows one by one by weights of several experts, divided among ranks by experts.

In: a module that is called with rows, an index of experts and a weight for each. Out: the same module with one rank's
experts, around which rows travel to the rank that has their expert, and back; the check, on real values, that the
module allows it; graphs of such models that follow from those of other numbers of ranks.

Imports: core, layouts, plan, torch_internals, trace.
"""
