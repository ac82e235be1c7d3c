"""Measure: makes the profile of the machine that it runs on.

In: the GPUs (or CPU cores) of this machine. Out: timings of matmuls, attention, memory-bound kernels, launches,
collectives and optimizers, fitted into a `HardwareProfile`.

Imports: core, costs, machine, plan, torch_internals, train.
"""
