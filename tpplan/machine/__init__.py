"""Machine: the speed and memory of GPUs and their links, as a profile states them.

In: a profile file, or measurements to fit. Out: `HardwareProfile`: seconds with error bars of matmuls, attention,
memory-bound kernels, collectives and the optimizer; a check of a profile, its report and charts. Needs no torch.

Imports: core.
"""
