"""Sections: the dataclasses of which a plan's file is made; their fields are its keys.

In: nothing. Out: each section as a frozen dataclass, the modes that sections name, and dims of inputs as functions of
batch and length. Needs no torch.

Imports: core, solvers.
"""
