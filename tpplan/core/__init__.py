"""Core: the words that every room speaks.

In: nothing. Out: errors with exit codes, units, files and JSON that are read strictly and written whole; the graph of a
model (`ModelGraph`: ops, boundaries, values), layouts and conversions between them, meshes, patterns of module names,
repeated blocks. Needs no torch.

Imports: nothing.
"""
