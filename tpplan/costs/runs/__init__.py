"""Runs: what an op launches, makes and saves on one rank, and the seconds of its kernels.

In: a call with a strategy, and a profile. Out: its execution, run on meta tensors of local shapes or grown from runs at
other sizes, and the time of each kernel.

Imports: apply, core, layouts, machine, plan, torch_internals, trace.
"""
