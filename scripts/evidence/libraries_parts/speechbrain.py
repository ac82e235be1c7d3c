"""speechbrain: encoders of speech."""

from speechbrain.lobes.models.transformer.TransformerASR import EncoderWrapper, TransformerASR
from torch import nn

from libraries_parts.case import Case, Inputs, drawn, squares

HEADS, FEATURES = 4, 32


def speech(batch: int, seq_len: int) -> Inputs:
    """Features of sounds in time."""
    return {"x": drawn(batch, seq_len, FEATURES)}


def recognizer(encoder: str, attention: str, positions: str) -> nn.Module:
    """The encoder of a recognizer of speech."""
    model = TransformerASR(
        tgt_vocab=64,
        input_size=FEATURES,
        d_model=64,
        nhead=HEADS,
        num_encoder_layers=2,
        num_decoder_layers=0,
        d_ffn=96,
        kernel_size=7,
        encoder_module=encoder,
        attention_type=attention,
        positional_encoding=positions,
        normalize_before=True,
        causal=False,
        csgu_linear_units=64,
    )
    return EncoderWrapper(model)


MODELS = {
    "transformer": Case(
        build_model=lambda: recognizer("transformer", "regularMHA", "fixed_abs_sine"),
        example_inputs=speech,
        loss=squares,
        heads=HEADS,
    ),
    "conformer": Case(
        build_model=lambda: recognizer("conformer", "RelPosMHAXL", "fixed_abs_sine"),
        example_inputs=speech,
        loss=squares,
        heads=HEADS,
    ),
    "branchformer": Case(
        build_model=lambda: recognizer("branchformer", "regularMHA", "fixed_abs_sine"),
        example_inputs=speech,
        loss=squares,
        heads=HEADS,
    ),
}
