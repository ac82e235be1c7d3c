"""timm: image classifiers."""

from timm.models.beit import Beit
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer

from libraries_parts.case import Case, images, squares

SIZE, PATCH, WIDTH, HEADS, CLASSES = 32, 8, 64, 4, 16
VIT = {
    "img_size": SIZE,
    "patch_size": PATCH,
    "embed_dim": WIDTH,
    "depth": 2,
    "num_heads": HEADS,
    "num_classes": CLASSES,
}

MODELS = {
    "vit": Case(
        build_model=lambda: VisionTransformer(**VIT, drop_path_rate=0.1),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "swin": Case(
        build_model=lambda: SwinTransformer(
            img_size=SIZE,
            patch_size=2,
            window_size=4,
            embed_dim=32,
            depths=(2, 2),
            num_heads=(HEADS, 8),
            num_classes=CLASSES,
            drop_path_rate=0.0,
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "beit": Case(
        build_model=lambda: Beit(**VIT, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "eva": Case(
        build_model=lambda: Eva(**VIT, use_rot_pos_emb=True, swiglu_mlp=True, scale_mlp=True),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "max_vit": Case(
        build_model=lambda: MaxxVit(
            MaxxVitCfg(
                embed_dim=(WIDTH, WIDTH),
                depths=(1, 1),
                block_type=("M", "M"),
                stem_width=16,
                transformer_cfg=MaxxVitTransformerCfg(dim_head=WIDTH // HEADS, window_size=(4, 4), grid_size=(4, 4)),
            ),
            img_size=SIZE,
            num_classes=CLASSES,
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
        batch=2,
    ),
    "convnext": Case(
        build_model=lambda: ConvNeXt(depths=(1, 1, 1, 1), dims=(16, 32, 48, 64), num_classes=CLASSES),
        example_inputs=images("x", SIZE),
        loss=squares,
    ),
    "mixer": Case(
        build_model=lambda: MlpMixer(
            img_size=SIZE, patch_size=PATCH, embed_dim=WIDTH, num_blocks=2, num_classes=CLASSES
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
    ),
}
