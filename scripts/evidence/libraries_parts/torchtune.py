"""torchtune: language models, one with low-rank adapters, and a vision encoder."""

from torchtune.models.clip import clip_vision_encoder
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3 import llama3, lora_llama3

from libraries_parts.case import VOCABULARY, Case, Inputs, drawn, next_token, squares, text

HEADS, GROUPS = 4, 2
SIZES = {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": HEADS, "num_kv_heads": GROUPS, "embed_dim": 64}


def tiles(batch: int, seq_len: int) -> Inputs:
    """An image in one tile."""
    return {"images": drawn(batch, 1, 1, 3, 32, 32)}


MODELS = {
    "llama3": Case(
        build_model=lambda: llama3(**SIZES, max_seq_len=32, intermediate_dim=96),
        example_inputs=text("tokens"),
        loss=next_token,
        heads=GROUPS,
    ),
    "llama3_lora": Case(
        build_model=lambda: lora_llama3(
            ["q_proj", "v_proj"],
            apply_lora_to_mlp=True,
            **SIZES,
            max_seq_len=32,
            intermediate_dim=96,
            lora_rank=4,
            lora_alpha=8,
        ),
        example_inputs=text("tokens"),
        loss=next_token,
        heads=GROUPS,
    ),
    "gemma2": Case(
        build_model=lambda: gemma2(**SIZES, head_dim=16, max_seq_len=32, intermediate_dim=96, sliding_window_size=8),
        example_inputs=text("tokens"),
        loss=next_token,
        heads=GROUPS,
    ),
    "clip_vision": Case(
        build_model=lambda: clip_vision_encoder(
            tile_size=32, patch_size=8, embed_dim=64, num_layers=2, num_heads=HEADS, max_num_tiles=1
        ),
        example_inputs=tiles,
        loss=squares,
        heads=HEADS,
    ),
}
