"""Hooks: how tpplan changes the way a model's code runs, while the model is traced or runs sharded.

In: a module, or code that is about to run. Out: context managers that put everything back at their end, and generated
classes: calls rewritten, closures rebound to a copy, random states of the host restored, recomputed code run under the
contexts of its first run; and tpplan's own operators.

Imports: core, torch_internals.
"""
