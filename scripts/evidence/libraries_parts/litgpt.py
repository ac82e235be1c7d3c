"""litgpt: language models of several families by one configuration."""

from litgpt import GPT, Config

from libraries_parts.case import VOCABULARY, Case, next_token, text

HEADS = 4
SIZES = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": HEADS,
    "block_size": 32,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
}
LLAMA = {"norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False, "rotary_percentage": 1.0}


def language_model(heads: int = HEADS, **options: object) -> Case:
    """A model of a configuration; `heads`: of keys and values."""
    return Case(
        build_model=lambda: GPT(Config(**SIZES, **options)), example_inputs=text("idx"), loss=next_token, heads=heads
    )


MODELS = {
    "pythia": language_model(),
    "llama": language_model(2, **LLAMA, n_query_groups=2, mlp_class_name="LLaMAMLP", intermediate_size=96),
    "mixtral": language_model(
        2,
        **LLAMA,
        n_query_groups=2,
        mlp_class_name="LLaMAMoE",
        moe_intermediate_size=96,
        n_expert=4,
        n_expert_per_token=2,
    ),
    "gemma": language_model(
        **LLAMA,
        head_size=16,
        mlp_class_name="GemmaMLP",
        intermediate_size=96,
        scale_embeddings=True,
        sliding_window_size=8,
        sliding_window_indices=[1, 0],
        attention_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
}
