"""diffusers: denoisers of images and an autoencoder."""

import torch
from diffusers import (
    AutoencoderKL,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)

from libraries_parts.case import Case, Inputs, drawn, images, squares

HEADS, HEAD_DIM, LATENT, TEXT = 4, 8, 8, 32


def latents(batch: int, channels: int = 4) -> torch.Tensor:
    """Noisy images."""
    return drawn(batch, channels, LATENT, LATENT)


def times(batch: int) -> torch.Tensor:
    """Steps of diffusion."""
    return torch.full((batch,), 7)


def of_unet(batch: int, seq_len: int) -> Inputs:
    """An image, and a text."""
    return {"sample": latents(batch), "timestep": times(batch), "encoder_hidden_states": drawn(batch, seq_len, TEXT)}


def of_dit(batch: int, seq_len: int) -> Inputs:
    """An image, and its class."""
    return {
        "hidden_states": latents(batch),
        "timestep": times(batch),
        "class_labels": torch.full((batch,), 3),
    }


def conditions(batch: int, seq_len: int) -> Inputs:
    """A text, and the whole of it in one row."""
    return {
        "encoder_hidden_states": drawn(batch, seq_len, TEXT, seed=1),
        "pooled_projections": drawn(batch, TEXT, seed=2),
    }


def of_flux(batch: int, seq_len: int) -> Inputs:
    """Patches of an image and a text, with their places."""
    return {
        **conditions(batch, seq_len),
        "hidden_states": drawn(batch, seq_len, 16),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": torch.zeros(seq_len, 3),
        "txt_ids": torch.zeros(seq_len, 3),
    }


def of_sd3(batch: int, seq_len: int) -> Inputs:
    """An image and a text."""
    return {**conditions(batch, seq_len), "hidden_states": latents(batch), "timestep": times(batch)}


MODELS = {
    "unet": Case(
        build_model=lambda: UNet2DConditionModel(
            sample_size=LATENT,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=TEXT,
            attention_head_dim=HEADS,
            norm_num_groups=8,
        ),
        example_inputs=of_unet,
        loss=squares,
        heads=HEADS,
    ),
    "dit": Case(
        build_model=lambda: DiTTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=LATENT,
            num_embeds_ada_norm=10,
            norm_num_groups=8,
        ),
        example_inputs=of_dit,
        loss=squares,
        heads=HEADS,
    ),
    "flux": Case(
        build_model=lambda: FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            axes_dims_rope=(4, 6, 6),
        ),
        example_inputs=of_flux,
        loss=squares,
        heads=HEADS,
    ),
    "sd3": Case(
        build_model=lambda: SD3Transformer2DModel(
            sample_size=LATENT,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=TEXT,
            caption_projection_dim=HEADS * HEAD_DIM,
            pooled_projection_dim=TEXT,
        ),
        example_inputs=of_sd3,
        loss=squares,
        heads=HEADS,
    ),
    "autoencoder": Case(
        build_model=lambda: AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=8,
            mid_block_add_attention=False,
        ),
        example_inputs=images("sample", 16),
        loss=squares,
    ),
}
