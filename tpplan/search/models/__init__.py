"""Models: the user's model, loaded, built on the meta device, and traced once per micro-batch.

In: a model file or builder, and its inputs. Out: a `ModelSpec`, what solve is given of it; a `Subject`, all that a
trace depends on; `TraceCache` with a trace per micro-batch, some grown from smaller ones; `Reuse`, what calls share.

Imports: core, costs, experts, layouts, machine, plan, prove, stages, torch_internals, trace.
"""
