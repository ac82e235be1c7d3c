"""Step: the time and the memory of a whole training step, as an ILP and as a prediction.

In: priced decisions, a mesh, the settings of training. Out: `Formulation`, the ILP of a mesh; of an assignment its
collectives, its seconds by part, and the timeline of its memory, replayed op by op.

Imports: apply, core, layouts, machine, plan, solvers; costs, costs/runs.
"""
