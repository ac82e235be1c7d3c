"""Pins that make the plan of an example what Megatron does, for the testbed, the published runs and the plans of
scripts/gpu."""


def megatron_pins(norms: str) -> dict[str, str]:
    """Megatron's layouts of an example's layers; norms are "replicate", or "sequence" between the pairs."""
    pairs = dict.fromkeys(("layers.*.attention", "layers.*.feed_forward"), "megatron")
    return pairs | dict.fromkeys(("layers.*.attention_norm", "layers.*.ffn_norm", "norm"), norms)
