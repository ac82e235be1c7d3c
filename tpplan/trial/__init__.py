"""Trial: plans tried for some steps on the real ranks, and what that says of the profile.

In: plans, a model and a process group; or a plan and a torch.profiler trace of a training run. Out: measured seconds by
part and peak memory beside those predicted; the ops and collectives that are predicted worst; a profile whose fitted
numbers come from these runs.

Imports: apply, core, costs, layouts, machine, measure, plan, search, torch_internals, trace, train, verify.
"""
