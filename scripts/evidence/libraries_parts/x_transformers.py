"""x-transformers: language models and encoders with what its options turn on."""

from torch import Tensor, nn
from x_transformers import Decoder, Encoder, TransformerWrapper, ViTransformerWrapper, XTransformer

from libraries_parts.case import VOCABULARY, Case, Inputs, images, next_token, squares, tokens

WIDTH, HEADS, HEAD_DIM, LENGTH = 64, 4, 16, 32


def sentence(batch: int, seq_len: int) -> Inputs:
    """Ids. Their forward takes any keyword, so that targets may not stand beside them."""
    return {"x": tokens(batch, seq_len)}


def again(outputs: Tensor, inputs: Inputs) -> Tensor:
    """Cross entropy of saying the same ids again."""
    return next_token(outputs, {"targets": inputs["x"]})


def decoder(heads: int = HEADS, **options: object) -> Case:
    """A language model of two layers; `heads`: of keys and values."""

    def build_model() -> nn.Module:
        layers = Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=HEAD_DIM, **options)
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)

    return Case(build_model=build_model, example_inputs=sentence, loss=again, heads=heads)


def source_and_target(batch: int, seq_len: int) -> Inputs:
    """Ids of both."""
    return {"src": tokens(batch, seq_len), "tgt": tokens(batch, seq_len, seed=1)}


MODELS = {
    "decoder": decoder(),
    "rotary_grouped": decoder(
        2, rotary_pos_emb=True, attn_flash=True, ff_glu=True, use_rmsnorm=True, attn_kv_heads=2, ff_swish=True
    ),
    "alibi_qk_norm": decoder(alibi_pos_bias=True, attn_qk_norm=True),
    "vit": Case(
        build_model=lambda: ViTransformerWrapper(
            image_size=32,
            patch_size=8,
            num_classes=16,
            attn_layers=Encoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=HEAD_DIM),
        ),
        example_inputs=images("img", 32),
        loss=squares,
        heads=HEADS,
    ),
    "encoder_decoder": Case(
        build_model=lambda: XTransformer(
            dim=WIDTH,
            enc_num_tokens=VOCABULARY,
            enc_depth=1,
            enc_heads=HEADS,
            enc_max_seq_len=LENGTH,
            dec_num_tokens=VOCABULARY,
            dec_depth=1,
            dec_heads=HEADS,
            dec_max_seq_len=LENGTH,
        ),
        example_inputs=source_and_target,
        loss=lambda outputs, inputs: outputs,
        heads=HEADS,
        seq_len=17,
    ),
}
