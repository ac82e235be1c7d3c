"""Packages of one model each."""

import torch
from conformer import Conformer
from enformer_pytorch import Enformer, modeling_enformer
from iTransformer import iTransformer
from local_attention import LocalTransformer
from perceiver_pytorch import Perceiver
from rtdl_revisiting_models import FTTransformer
from tab_transformer_pytorch import TabTransformer

from libraries_parts.case import VOCABULARY, Case, Inputs, drawn, next_token, squares, text, tokens

# where there is a process group it builds itself with SyncBatchNorm, which has no CPU
modeling_enformer.MaybeSyncBatchnorm = lambda is_distributed=None: torch.nn.BatchNorm1d

HEADS, FEATURES, CATEGORIES = 4, 6, (5, 7, 4)


def table(categories: str, numbers: str) -> object:
    """example_inputs of rows of a table."""

    def inputs(batch: int, seq_len: int) -> Inputs:
        return {categories: tokens(batch, len(CATEGORIES), below=4), numbers: drawn(batch, FEATURES)}

    return inputs


def bases(batch: int, seq_len: int) -> Inputs:
    """A strand of DNA."""
    return {"x": torch.nn.functional.one_hot(tokens(batch, 64, below=4), 4).float()}


MODELS = {
    "perceiver_pytorch": Case(
        build_model=lambda: Perceiver(
            num_freq_bands=4,
            depth=2,
            max_freq=10.0,
            num_latents=8,
            latent_dim=64,
            cross_heads=HEADS,
            latent_heads=HEADS,
            cross_dim_head=16,
            latent_dim_head=16,
            num_classes=16,
        ),
        example_inputs=lambda batch, seq_len: {"data": drawn(batch, 8, 8, 3)},
        loss=squares,
        heads=HEADS,
    ),
    "conformer": Case(
        build_model=lambda: Conformer(dim=64, depth=2, dim_head=16, heads=HEADS, conv_kernel_size=7),
        example_inputs=lambda batch, seq_len: {"x": drawn(batch, seq_len, 64)},
        loss=squares,
        heads=HEADS,
        batch=3,
    ),
    "enformer_pytorch": Case(
        build_model=lambda: Enformer.from_hparams(
            dim=48,
            depth=1,
            heads=HEADS,
            output_heads={"human": 8},
            target_length=8,
            attn_dim_key=12,
            num_downsamples=3,
            dim_divisible_by=2,
            dropout_rate=0.0,
            attn_dropout=0.0,
            pos_dropout=0.0,
        ),
        example_inputs=bases,
        loss=squares,
        heads=HEADS,
        batch=3,
    ),
    "itransformer": Case(
        build_model=lambda: iTransformer(
            num_variates=8, lookback_len=16, depth=2, dim=64, pred_length=4, dim_head=16, heads=HEADS
        ),
        example_inputs=lambda batch, seq_len: {"x": drawn(batch, 16, 8)},
        loss=squares,
        heads=HEADS,
    ),
    "local_attention": Case(
        build_model=lambda: LocalTransformer(
            num_tokens=VOCABULARY,
            dim=64,
            depth=2,
            max_seq_len=32,
            local_attn_window_size=8,
            dim_head=16,
            heads=HEADS,
            causal=True,
        ),
        example_inputs=text("x"),
        loss=next_token,
        heads=HEADS,
    ),
    "rtdl_revisiting_models": Case(
        build_model=lambda: FTTransformer(
            n_cont_features=FEATURES,
            cat_cardinalities=list(CATEGORIES),
            d_out=4,
            n_blocks=2,
            d_block=64,
            attention_n_heads=HEADS,
            attention_dropout=0.0,
            ffn_d_hidden=96,
            ffn_d_hidden_multiplier=None,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        example_inputs=table("x_cat", "x_cont"),
        loss=squares,
        heads=HEADS,
    ),
    "tab_transformer_pytorch": Case(
        build_model=lambda: TabTransformer(
            categories=CATEGORIES,
            num_continuous=FEATURES,
            dim=64,
            depth=2,
            heads=HEADS,
            dim_head=16,
            mlp_act=torch.nn.ReLU(),
        ),
        example_inputs=table("x_categ", "x_cont"),
        loss=squares,
        heads=HEADS,
    ),
}
