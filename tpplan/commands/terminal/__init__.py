"""Terminal: what several verbs of the command line share, options and output.

In: a verb's arguments, plans, times. Out: text of the terminal's width, progress, pins, this rank's device.

Imports: core, layouts, plan, search.
"""
