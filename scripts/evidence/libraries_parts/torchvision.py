"""torchvision: image classifiers."""

from torchvision.models import ConvNeXt, ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

from libraries_parts.case import Case, images, squares

SIZE, PATCH, WIDTH, HEADS, CLASSES = 32, 8, 64, 4, 16

MODELS = {
    "vit": Case(
        build_model=lambda: VisionTransformer(
            image_size=SIZE,
            patch_size=PATCH,
            num_layers=2,
            num_heads=HEADS,
            hidden_dim=WIDTH,
            mlp_dim=2 * WIDTH,
            num_classes=CLASSES,
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "swin_v2": Case(
        build_model=lambda: SwinTransformer(
            patch_size=[2, 2],
            embed_dim=32,
            depths=[2, 2],
            num_heads=[HEADS, 8],
            window_size=[4, 4],
            stochastic_depth_prob=0.0,
            num_classes=CLASSES,
            block=SwinTransformerBlockV2,
            downsample_layer=PatchMergingV2,
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
        heads=HEADS,
    ),
    "resnet": Case(
        build_model=lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES),
        example_inputs=images("x", 64),
        loss=squares,
        batch=3,
    ),
    "convnext": Case(
        build_model=lambda: ConvNeXt(
            [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.0, num_classes=CLASSES
        ),
        example_inputs=images("x", SIZE),
        loss=squares,
    ),
}
