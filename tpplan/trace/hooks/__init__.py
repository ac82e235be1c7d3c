"""Hooks: what a model runs under while it is traced or run sharded, and after which it is as it was.

In: a module, or code that is about to run. Out: context managers and generated classes: forwards rewritten, closures
and random states of the host put back, the code that checkpoints run again surrounded as before, operators of tpplan's.

Imports: torch_internals.
"""
