"""Rules of convolutions, pooling and resampling: channels shard like features, spatial dims stay whole."""

from collections.abc import Iterable

from tpplan.layouts.rules.call import Call, Strategy, op_rule
from tpplan.layouts.rules.equation import einsum


def _space(letter: str, dims: int) -> str:
    return " ".join(f"{letter}{i}" for i in range(dims))


def _num_space_dims(target: str) -> int:
    """Number of spatial dims, the digit in the operator's name: `aten.conv2d.default` has 2."""
    return int(next(character for character in target if character.isdecimal()))


@op_rule(
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
    "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding",
)  # fmt: skip
def convolution(call: Call) -> Iterable[Strategy]:
    """c input channels, o output channels. Grouped convolutions shard input and output channels by whole groups."""
    dims = _num_space_dims(call.target)
    space, kernel, place = (_space(letter, dims) for letter in "skp")
    batch = "b" if len(call.operands[0].shape) == dims + 2 else ""
    bias = ", o" if len(call.operands) == 3 else ""
    is_grouped = call.integer(6, "groups", 1) != 1
    return einsum(
        call,
        f"{batch} {'o' if is_grouped else 'c'} {space}, o c {kernel}{bias} -> {batch} o {place}",
        multilinear=True,
        added=frozenset({2}) if bias else frozenset(),
        whole=f"{space} {kernel} {place} {'c' if is_grouped else ''}",
    )


@op_rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def transposed_convolution(call: Call) -> Iterable[Strategy]:
    """As a convolution, with the weight's first two dims swapped: input channels, output channels of a group."""
    dims = _num_space_dims(call.target)
    space, kernel, place = (_space(letter, dims) for letter in "skp")
    batch = "b" if len(call.operands[0].shape) == dims + 2 else ""
    bias = ", o" if len(call.operands) == 3 else ""
    is_grouped = call.integer(6, "groups", 1) != 1
    channels = "o g" if is_grouped else "c o"
    return einsum(
        call,
        f"{batch} {channels[0]} {space}, {channels} {kernel}{bias} -> {batch} o {place}",
        multilinear=True,
        added=frozenset({2}) if bias else frozenset(),
        whole=f"{space} {kernel} {place} g",
    )


@op_rule("aten.im2col.default", "aten.col2im.default")
def patches(call: Call) -> Iterable[Strategy]:
    """`b c h w -> b (c k k) l` and back; patches are ordered by channels first."""
    image, columns = "c h w", "c l"
    source, result = (image, columns) if call.target == "aten.im2col.default" else (columns, image)
    batch = "b" if len(call.operands[0].shape) == len(source.split()) + 1 else ""
    return einsum(call, f"{batch} {source} -> {batch} {result}", whole="h w l", linear_in=(frozenset({0}),))


@op_rule("aten.max_pool1d.default", "aten.max_pool2d.default", "aten.max_pool3d.default")
def max_pool(call: Call) -> Iterable[Strategy]:
    """Shards of batch and channels pass through; a maximum is not linear."""
    return _resampled(call, ())


@op_rule(
    "aten.avg_pool1d.default", "aten.avg_pool2d.default", "aten.avg_pool3d.default", "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default", "aten.upsample_nearest2d.vec",
    "aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec",
)  # fmt: skip
def linear_resampling(call: Call) -> Iterable[Strategy]:
    """Shards of batch and channels pass through, and so do partial values."""
    return _resampled(call, (frozenset({0}),))


def _resampled(call: Call, linear_in: tuple[frozenset[int], ...]) -> Iterable[Strategy]:
    dims = _num_space_dims(call.target)
    space, place = _space("s", dims), _space("p", dims)
    return einsum(call, f"... {space} -> ... {place}", whole=f"{space} {place}", linear_in=linear_in)
