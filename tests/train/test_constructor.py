"""Constructors recorded on the meta device: every value is the one that the constructor makes, draw by draw."""

import copy
import hashlib
import math

import pytest
import torch
import torch.nn.functional as F
from examples import example
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.core.errors import ModelError
from tpplan.train.deferred_init import record
from tpplan.train.materialize import targets_of

SEED = 3


class Drawing(TorchDispatchMode):
    """The oracle: a constructor that runs as ever, but for the generator, which is seeded before each random op."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.num_draws = seed, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and not (kwargs or {}).get("generator"):
            digest = hashlib.sha256(f"{self.seed} {self.num_draws}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8]) >> 1)
        self.num_draws += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class Rotary(nn.Module):
    """Buffers that no state_dict holds, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float32) / 8)
        angles = torch.outer(torch.arange(16, dtype=torch.float32), frequencies)
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.frequencies = frequencies


class Odd(nn.Module):
    """What constructors do besides torch.empty and reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=3)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 4)
        layer = nn.Linear(8, 8)
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(6, 8) / 5)
        self.ones = nn.Parameter(torch.ones(8))
        self.data = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.steps = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]) * torch.linspace(0, 1, 3))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.parts = [part.tolist() for part in torch.linspace(0, 0.5, 6).split([2, 4])]
        self.array = nn.Parameter(torch.from_numpy(torch.linspace(0, 1, 5).numpy() * 2))
        self.shift = self.rates[1] + self.parts[1][2] + float(torch.rand(3).max())
        self.shifted = nn.Parameter(torch.full((3,), self.shift))
        self.half = nn.Linear(8, 4).to(torch.bfloat16)
        self.rotary = Rotary()
        truncated = nn.Parameter(torch.empty(20, 8))
        nn.init.trunc_normal_(truncated, std=0.02)
        self.truncated = truncated
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(6, 6)))
        with torch.no_grad():
            self.head.weight[0] = self.copies[0].bias.new_full((8,), 7.0)
            self.copies[1].bias[2:4].copy_(self.scale[0, :2])
            for name, parameter in self.named_parameters():
                if name.endswith("out_proj.weight"):
                    parameter.data.normal_(std=1 / math.sqrt(2 * 6))
        self.norm.running_var.fill_(2.0)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        **{target.names[0]: target.tensor.detach() for target in targets_of(model)},
        **dict(model.named_buffers()),
        **{f"{name}.{k}": v for name, m in model.named_modules() for k, v in vars(m).items() if isinstance(v, Tensor)},
    }


def torch_transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), num_layers=2)


@pytest.mark.parametrize(
    "build_model",
    [Odd, torch_transformer, *(example(name).build_model for name in ("llama", "gpt", "nanogpt", "vit"))],
    ids=["odd", "torch", "llama", "gpt", "nanogpt", "vit"],
)
def test_values_are_those_of_the_constructor(build_model) -> None:
    with Drawing(SEED):
        expected = tensors(build_model())
    state = torch.get_rng_state()
    recording = record(build_model, seed=SEED)
    found = tensors(recording.model)
    assert found.keys() == expected.keys()
    for name in reversed(found):  # in another order than they were made
        value = recording.value(found[name])
        assert value.dtype == expected[name].dtype, name
        assert value.stride() == expected[name].stride(), name
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_transformers_models_are_recorded() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip

    def build_model() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(config)

    with Drawing(SEED):
        expected = tensors(build_model())
    recording = record(build_model, seed=SEED)
    found = tensors(recording.model)
    assert found.keys() == expected.keys()
    assert all(recording.is_set(tensor) or not tensor.is_meta for tensor in found.values())
    for name, tensor in found.items():
        assert torch.equal(recording.value(tensor), expected[name]), name


def test_parameters_keep_the_distribution_of_reset_parameters() -> None:
    recording = record(lambda: nn.Linear(400, 300), seed=0)
    weight = recording.value(recording.model.weight)
    bound = 1 / math.sqrt(400)  # kaiming_uniform_ with a = sqrt(5)
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)  # of a uniform distribution
    assert abs(weight.mean().item()) < 0.01 * bound
    assert not torch.equal(weight, (again := record(lambda: nn.Linear(400, 300), seed=1)).value(again.model.weight))


class Fixed(nn.Module):
    """Tables drawn from a generator of the module's own, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("first", torch.randn(4, 4, generator=generator), persistent=False)
        self.register_buffer("second", torch.empty(3).uniform_(generator=generator), persistent=False)
        self.register_buffer("drawn", torch.randn(2), persistent=False)


def test_a_generator_of_the_constructors_own_is_heeded() -> None:
    expected, recording = Fixed(), record(Fixed, seed=SEED)
    for name in ("first", "second"):
        assert torch.equal(recording.value(getattr(recording.model, name)), getattr(expected, name))
        assert not recording.is_drawn(getattr(recording.model, name))
    assert recording.is_drawn(recording.model.drawn)


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.bias = nn.Parameter(torch.empty(4).zero_())


def test_what_the_constructor_leaves_unset_is_seen() -> None:
    recording = record(Unset, seed=0)
    assert not recording.is_set(recording.model.weight)
    assert recording.is_set(recording.model.bias)


def test_what_is_overwritten_is_not_drawn_again() -> None:
    def build_model() -> nn.Module:
        linear = nn.Linear(4, 4)
        nn.init.normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        return linear

    recording = record(build_model, seed=0)
    names = [op.function.name() for op in recording._history(recording.model.weight)]
    assert names == ["aten::empty.memory_format", "aten::normal_"]
    assert not recording.is_drawn(recording.model.bias)


def test_meta_tensors_from_elsewhere_are_refused() -> None:
    outside = torch.ones(3, device="meta")
    recording = record(lambda: nn.ParameterList([nn.Parameter(outside)]), seed=0)
    with pytest.raises(ModelError, match=r"uses a tensor \[3\] on the meta device that it did not make"):
        recording.value(recording.model[0])


def test_errors_of_the_constructor_say_when_they_happened() -> None:
    with pytest.raises(RuntimeError) as raised:
        record(lambda: nn.Sequential(F.linear(torch.ones(2, 3), torch.ones(4, 5))), seed=0)
    assert "while build_model ran on the meta device" in raised.value.__notes__[0]
