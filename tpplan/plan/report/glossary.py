"""The words of reports, each explained in a sentence or two, in the order in which a report uses them."""

import textwrap
from collections.abc import Iterator

GLOSSARY = {
    "mesh": "The GPUs as a grid, replicate x shard x tp: each GPU has a place on each of the three axes.",
    "replicate": "Ranks along this axis have the same weights and read other parts of the batch; gradients are "
    "averaged by an all-reduce (plain data parallelism, DDP).",
    "shard": "Ranks along this axis read other parts of the batch and hold a slice each of weights, gradients and "
    "optimizer states. FSDP gathers the weights of a unit, mostly a layer, before it runs.",
    "tp": "Tensor parallelism: ranks along this axis read the same batch and compute a part of each layer.",
    "shard_tp": "The ranks of shard and tp together. Where tp replicates all weights of a layer, FSDP may shard the "
    "layer over all of them, instead of alike on each tp rank.",
    "ep": "Expert parallelism: ranks next to each other on the shard axis have different experts each. A row goes "
    "to the rank that has its expert, and its result comes back, by all-to-alls whose sizes the routing decides. FSDP "
    "shards a rank's experts over the ranks that have the same ones (expert_shard).",
    "rank": "One process with one GPU.",
    "micro-batch": "Samples that a rank computes at once. A step adds up the gradients of several (accumulation).",
    "ZeRO-3, ZeRO-2": "Whether FSDP drops a unit's gathered weights after forward and gathers them again for backward "
    "(3: less memory), or keeps them until then (2: less traffic).",
    "1f1b, interleaved, zero-bubble": "Orders in which pipeline stages run micro-batches: one forward and one backward "
    "in turns; the same with several stages on a GPU; and with the gradients of weights computed apart from the rest "
    "of a backward, where a stage would wait for others.",
    "recompute": "Parts of forward run again in backward instead of keeping what they gave: less memory, more time.",
    "MFU": "Model FLOP utilization: the FLOP per second of the model's own matrix products and attention, without what "
    "runs again, over what the GPUs used would do in the fastest product that the profile measured.",
    "+/-": "One standard deviation of the predicted time, from the profile's residuals.",
    "extrapolated": "Some products or messages are larger or smaller than all that the profile measured.",
    "slack": "Memory that the framework and its allocator take beside what is predicted; the profile says how much.",
    "transients": "Tensors that exist while one op runs.",
    "exposed": "A collective's time during which no compute runs.",
    "collective": "A message in which all ranks of an axis take part. all-gather: each gets all slices. "
    "reduce-scatter: summands are added, each gets a slice of the sum. all-reduce: summands are added, each gets the "
    "sum. all-to-all: slices of one dim become slices of another.",
    "layout": "How a value lies on the ranks of tp: one of the next five.",
    "R": "Every rank has the whole, and the whole of its gradient.",
    "R*": "Every rank has the whole; the gradient of each is a summand, and the sum over ranks is the gradient.",
    "S(d)": "Every rank has a slice of dim d (0 is the first), and the same slice of the gradient. S(d; a, b): of each "
    "of two parts that lie side by side. S(d)/m: one of m slices, m fewer than the ranks.",
    "P": "Every rank has a summand: the value is the sum over ranks.",
    "rows": "A lookup in a slice of a table: other ranks' ids are masked, then the sum over ranks is the value.",
    "conversion": "A change of layout where a tensor enters or leaves a module: a collective forward, one backward.",
    "column parallel": "A weight split by its outputs: a rank computes a slice of what the module gives from the whole "
    "of what it reads, and sends nothing.",
    "row parallel": "A weight split by its inputs: a rank computes a summand of the whole output from a slice of what "
    "the module reads. The summands are then added: an all-reduce, or a reduce-scatter.",
    "vocabulary parallel": "An embedding table split by rows: a rank looks up the ids that it has.",
    "on slices": "The weight is whole on every rank and meets slices of the input, of the sequence mostly.",
    "replicated": "Every rank of tp runs the whole module.",
    "tied": "The same weight under another name.",
    "divided": "An op of which each of tp ranks runs 1/tp of the FLOP.",
    "bound, gap": "No plan that was searched is faster than the bound; the gap is the plan's distance from it.",
    "point": "A mesh with a micro-batch; each has an optimum of its own.",
    "proof": "The applied model was run as the first and the last rank, and its ops and layouts compared with the "
    "model's own: it computes the same function.",
}


def glossary_lines(width: int) -> Iterator[str]:
    """Yields the glossary in lines of at most `width` columns: a word, its explanation indented below."""
    for word, text in GLOSSARY.items():
        yield word
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
