"""Prediction: what a training step of one assignment does, holds and takes, replayed op by op.

In: an assignment, a profile of the machine. Out: its collectives, the timeline of its memory with the peak, its seconds
by part with their error, and all of these as the sections of a plan (`price`).

Imports: apply, core, layouts, machine, plan, solvers; costs, costs/runs, costs/step.
"""
