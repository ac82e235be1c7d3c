"""Answers: what the code of a model is told while it is traced on meta tensors.

In: a question of the code (which device, which value, how many of them). Out: the answer that it would get on ranks;
where there is none, an error that names the module, so that it runs whole. tpplan's own failures are told from the
model's here, too.

Imports: core, machine, torch_internals; trace/hooks.
"""
