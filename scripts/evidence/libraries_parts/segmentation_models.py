"""segmentation-models-pytorch: decoders on encoders of its own."""

from segmentation_models_pytorch import FPN, Segformer, Unet

from libraries_parts.case import Case, images, squares

OPTIONS = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}

MODELS = {
    "unet": Case(
        build_model=lambda: Unet(**OPTIONS, encoder_depth=3, decoder_channels=(32, 16, 8)),
        example_inputs=images("x", 64),
        loss=squares,
        batch=3,
    ),
    "fpn": Case(
        build_model=lambda: FPN(**OPTIONS, decoder_pyramid_channels=32, decoder_segmentation_channels=32),
        example_inputs=images("x", 64),
        loss=squares,
        batch=3,
    ),
    "segformer": Case(
        build_model=lambda: Segformer(
            encoder_name="mit_b0", encoder_weights=None, classes=2, decoder_segmentation_channels=32
        ),
        example_inputs=images("x", 64),
        loss=squares,
        batch=3,
    ),
}
