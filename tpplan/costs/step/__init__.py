"""Step: the time and the memory of a whole training step, as an ILP and as a prediction.

In: priced decisions, a mesh, the settings of training. Out: `Formulation`, the ILP of a mesh; a solved step with every
strategy named; its prediction by parts; the timeline of its memory, replayed op by op.

Imports: core, layouts, machine, plan, solvers; costs.
"""
