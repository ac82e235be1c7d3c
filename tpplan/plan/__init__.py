"""Plan: the JSON file that says how a model is sharded, and what is derived from it.

In: a plan file, or its sections (tpplan.plan.sections). Out: `Plan`, valid on construction; its report and layer table;
the hash that ties a proof to it; plans made smaller for a test on few ranks.
Needs no torch.

Imports: core.
"""
