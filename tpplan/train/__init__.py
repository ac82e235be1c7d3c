"""Train: functions that a training script calls around an applied model.

In: an applied model, files of weights or checkpoints, the batch. Out: weights loaded or initialized shard by shard,
checkpoints that can be loaded on any mesh, samples by rank, loss weights, a guard that ends all ranks when one fails.

Imports: apply, core, plan, stages, torch_internals.
"""
