"""MONAI: segmentation of volumes and images."""

from monai.networks.nets import UNETR, DiffusionModelUNet, SegResNet, SwinUNETR, UNet, ViT

from libraries_parts.case import Case, Inputs, drawn, images, squares

HEADS = 4


def volume(size: int) -> object:
    """example_inputs of one volume."""
    return lambda batch, seq_len: {"x": drawn(batch, 1, size, size, size)}


def noisy(batch: int, seq_len: int) -> Inputs:
    """An image and its step of diffusion."""
    return {"x": drawn(batch, 1, 16, 16), "timesteps": (drawn(batch) > 9).long() + 7}


MODELS = {
    "unet": Case(
        build_model=lambda: UNet(2, 1, 2, channels=(16, 32, 64), strides=(2, 2), num_res_units=1),
        example_inputs=images("x", 32, 1),
        loss=squares,
    ),
    "segresnet": Case(
        build_model=lambda: SegResNet(spatial_dims=2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        example_inputs=images("x", 32, 1),
        loss=squares,
    ),
    "vit": Case(
        build_model=lambda: ViT(
            1, (16,) * 3, (8,) * 3, hidden_size=64, mlp_dim=128, num_layers=2, num_heads=HEADS, classification=True
        ),
        example_inputs=volume(16),
        loss=squares,
        heads=HEADS,
    ),
    "unetr": Case(
        build_model=lambda: UNETR(1, 2, (32, 32), 8, 64, 128, HEADS, spatial_dims=2),
        example_inputs=images("x_in", 32, 1),
        loss=squares,
        heads=HEADS,
    ),
    "swin_unetr": Case(
        build_model=lambda: SwinUNETR(
            1,
            2,
            depths=(1, 1, 1, 1),
            num_heads=(HEADS, HEADS, 8, 8),
            feature_size=24,
            window_size=4,
            spatial_dims=2,
        ),
        example_inputs=images("x_in", 64, 1),
        loss=squares,
        heads=HEADS,
    ),
    "diffusion_unet": Case(
        build_model=lambda: DiffusionModelUNet(
            2,
            1,
            1,
            num_res_blocks=1,
            channels=(16, 32),
            attention_levels=(False, True),
            norm_num_groups=8,
            num_head_channels=8,
        ),
        example_inputs=noisy,
        loss=squares,
        heads=HEADS,
    ),
}
