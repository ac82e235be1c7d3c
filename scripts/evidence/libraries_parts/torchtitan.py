"""torchtitan: its model files, unchanged, built from its configurations as it builds them.

Its language models attend by flex_attention with a mask per document, which has no backward on a CPU. Here they have
the fused attention that it uses in other models, and are causal.
"""

from torch import nn
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention

from libraries_parts.case import VOCABULARY, Case, next_token, text

WIDTH, HEADS, LENGTH = 64, 4, 32

#: its experts compute in bfloat16 whatever they are given: sums of slices round as one of its steps does (in float32
#: ranks differ from one process by 6e-7)
BF16_ROUNDING = 2**-7


def of_tokens(family: object, config: type, layers: list) -> nn.Module:
    """A language model of a family, with its weights and tables."""
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=family._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=family._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=family._output_linear_init(WIDTH)),
        layers=layers,
    ).build()
    model.init_states()
    return model


def llama(fuse_qkv: bool) -> nn.Module:
    """Llama 3."""
    layers = llama3._build_llama3_layers(
        fuse_qkv=fuse_qkv,
        n_layers=2,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        hidden_dim=96,
        rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=LENGTH, theta=500000, scaling="llama"),
        attn_backend="flex",
    )
    return of_tokens(llama3, llama3.Llama3Model.Config, layers)


def deepseek() -> nn.Module:
    """DeepSeek V3: a dense layer and one of experts."""
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=HEADS,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mscale=0.70,
        dense_hidden_dim=96,
        moe_hidden_dim=32,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=LENGTH, theta=10000.0),
    )
    return of_tokens(deepseek_v3, deepseek_v3.DeepSeekV3Model.Config, layers)


MODELS = {
    "llama3": Case(
        build_model=lambda: llama(fuse_qkv=False), example_inputs=text("tokens"), loss=next_token, heads=HEADS
    ),
    "llama3_fused": Case(
        build_model=lambda: llama(fuse_qkv=True), example_inputs=text("tokens"), loss=next_token, heads=HEADS
    ),
    "deepseek_v3": Case(
        build_model=deepseek, example_inputs=text("tokens"), loss=next_token, heads=HEADS, tolerance=BF16_ROUNDING
    ),
}
