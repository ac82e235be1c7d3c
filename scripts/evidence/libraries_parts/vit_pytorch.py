"""vit-pytorch: vision transformers written with einops."""

from vit_pytorch import SimpleViT, ViT
from vit_pytorch.cait import CaiT
from vit_pytorch.cct import CCT
from vit_pytorch.max_vit import MaxViT

from libraries_parts.case import Case, images, squares

SIZE, PATCH, WIDTH, HEADS, CLASSES = 32, 8, 64, 4, 16
VIT = {"image_size": SIZE, "patch_size": PATCH, "num_classes": CLASSES, "dim": WIDTH, "heads": HEADS, "mlp_dim": 128}

MODELS = {
    "vit": Case(
        build_model=lambda: ViT(**VIT, depth=2, dim_head=16),
        example_inputs=images("img", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "simple_vit": Case(
        build_model=lambda: SimpleViT(**VIT, depth=2, dim_head=16),
        example_inputs=images("img", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "cait": Case(
        build_model=lambda: CaiT(**VIT, depth=2, cls_depth=1, dim_head=16),
        example_inputs=images("img", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "cct": Case(
        build_model=lambda: CCT(
            img_size=(SIZE, SIZE),
            embedding_dim=WIDTH,
            n_conv_layers=1,
            num_layers=2,
            num_heads=HEADS,
            mlp_ratio=2.0,
            num_classes=CLASSES,
            positional_embedding="learnable",
            stochastic_depth_rate=0.0,
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "max_vit": Case(
        build_model=lambda: MaxViT(
            num_classes=CLASSES, dim=32, dim_conv_stem=16, dim_head=8, depth=(1, 1), window_size=4
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
        batch=3,
    ),
}
