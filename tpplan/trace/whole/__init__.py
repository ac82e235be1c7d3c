"""Whole: modules that a trace does not look into, and that every rank runs whole by their own code.

In: such a module and how it is called. Out: its ops as observed on fake tensors, which stand in the graph as one
operator; a class under which it runs whole once a plan is applied.

Imports: core, layouts, torch_internals; trace/answers, trace/hooks.
"""
