"""Layouts that only some values may have: slices of each part of a fused dim, and slices that several ranks share.

In: a `ModelGraph`, a number of ranks and the rules' strategies. Out: by value its layouts S(d; parts) and S(d)/m, which
`find_extra_layouts` names; the attention heads that dims of parameters are made of. Needs no torch.

Imports: core; layouts/rules.
"""
