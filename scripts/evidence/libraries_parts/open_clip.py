"""open_clip: towers of images and text."""

import torch
import torch.nn.functional as F
from open_clip import CLIP, CoCa
from torch import Tensor, nn

from libraries_parts.case import VOCABULARY, Case, Inputs, drawn, squares, tokens

HEADS, SIZE = 4, 32
VISION = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": SIZE}
TEXT = {"context_length": 16, "vocab_size": VOCABULARY, "width": 64, "heads": HEADS, "layers": 2}


def pairs(batch: int, seq_len: int) -> Inputs:
    """Images with their texts."""
    return {"image": drawn(batch, 3, SIZE, SIZE), "text": tokens(batch, seq_len)}


def contrast(outputs: tuple[Tensor, ...], inputs: Inputs) -> Tensor:
    """How well each image finds its text."""
    image, text, scale = outputs[:3]
    return F.cross_entropy(scale * image @ text.T, torch.arange(len(image), device=image.device))


def captioner() -> CoCa:
    """A CoCa, with the projection drawn that its multimodal decoder leaves as memory was."""
    model = CoCa(
        embed_dim=64,
        vision_cfg=VISION
        | {"attentional_pool": True, "attn_pooler_heads": HEADS, "attn_pooler_queries": 9, "output_tokens": True},
        text_cfg=TEXT | {"embed_cls": True, "output_tokens": True},
        multimodal_cfg=TEXT | {"dim_head": 16},
    )
    nn.init.normal_(model.text_decoder.text_projection, std=0.1)
    return model


MODELS = {
    "clip": Case(
        build_model=lambda: CLIP(embed_dim=32, vision_cfg=VISION, text_cfg=TEXT),
        example_inputs=pairs,
        loss=contrast,
        heads=HEADS,
        batch=3,
    ),
    "clip_resnet": Case(
        build_model=lambda: CLIP(
            embed_dim=32,
            vision_cfg={"layers": (1, 1, 1, 1), "width": 8, "head_width": 16, "image_size": 64},
            text_cfg=TEXT,
        ),
        example_inputs=lambda batch, seq_len: pairs(batch, seq_len) | {"image": drawn(batch, 3, 64, 64)},
        loss=contrast,
        heads=HEADS,
        batch=3,
    ),
    "coca": Case(
        build_model=captioner,
        example_inputs=lambda batch, seq_len: pairs(batch, seq_len - 1),
        loss=squares,
        heads=HEADS,
        batch=3,
    ),
}
