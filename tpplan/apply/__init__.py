"""Apply: a plan put on an eager model, in place, with DTensor and FSDP2.

In: a model, on the meta device or filled, and a `Plan`. Out: the same model, whose parameters are DTensors and whose
modules convert what enters and leaves them; its forward is recomputed as planned, its first steps are checked.

Imports: core, plan, torch_internals, trace.
"""
