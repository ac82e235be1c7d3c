"""Page: a plan as one HTML file that loads nothing from the network.

In: a plan, and its step pulled apart where the model was at hand. Out: the text of a page: the answer, the mesh on its
nodes, time and memory by part and over the step, layers, collectives, and where the numbers come from; of several
plans a table, and their steps by part on one scale. Needs no torch.

Imports: core, plan.
"""
