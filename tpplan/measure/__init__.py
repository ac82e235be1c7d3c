"""Measure: a profile of the machine at hand.

In: the GPUs (or CPU cores) of this machine. Out: timings of matmuls, attention, memory-bound kernels, launches,
collectives and optimizers, fitted into a `HardwareProfile`.

Imports: core, costs, machine, plan, torch_internals.
"""
