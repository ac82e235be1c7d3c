"""Step: the seconds and the memory of a whole training step, as the ILP of a mesh.

In: priced decisions, a mesh, the settings of training. Out: `Formulation`, the ILP whose objective is the seconds of a
step (`Objective`) and whose resources are bytes at each moment at which memory may peak (`Peaks`).

Imports: apply, core, layouts, machine, plan, solvers; costs, costs/runs.
"""
