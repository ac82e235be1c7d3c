"""Core: data types and helpers that every room shares.

In: nothing. Out: errors with exit codes; units; strict reading and atomic writing of files and JSON; the graph of a
model (`ModelGraph`: ops, boundaries, values) and its fingerprint; layouts and the conversions between them; meshes;
patterns of module names; repeated blocks. Needs no torch.

Imports: nothing.
"""
