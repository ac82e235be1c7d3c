"""Page: a plan as one HTML file that loads nothing from the network.

In: a plan. Out: the text of a page: the answer, the mesh on its nodes, time and memory by part, layers, collectives,
and where the numbers come from. Needs no torch.

Imports: core, plan.
"""
