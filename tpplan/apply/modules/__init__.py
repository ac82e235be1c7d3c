"""Modules: what a plan makes of each module of a model.

In: a module and what the plan says of it. Out: a generated subclass whose forward runs on local tensors: parameters
read, inputs and outputs converted, sizes replaced, dropout drawn per rank; checks of input shapes and of the first
step.

Imports: core, plan, torch_internals, trace; apply/collectives.
"""
