"""Modules: applies a plan to each module of a model, and checks what the applied model is given.

In: a module and the plan's entries for it. Out: a generated subclass whose forward runs on local tensors: it reads
local parameters, converts inputs and outputs, replaces sizes and draws dropout per rank. Also hooks on the model that
check the shapes of inputs and the first training step.

Imports: core, plan, stages, torch_internals, trace; apply/collectives.
"""
