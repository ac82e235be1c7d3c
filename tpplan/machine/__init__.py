"""Machine: what a GPU and its links can do, as a profile says it.

In: a profile file, or measurements to fit. Out: `HardwareProfile`: seconds with error bars of matmuls, attention,
memory-bound kernels, collectives and the optimizer; a check of a profile, its report and charts. Needs no torch.

Imports: core.
"""
