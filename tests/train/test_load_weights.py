"""Models applied on the meta device and filled afterwards: with local shards alone, and the values they should have."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from fused_model import FusedModel, batch, build_model, loss_of, plan_for
from plans import handmade_plan
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tpplan
from tpplan.apply.apply import apply_plan
from tpplan.core.errors import ModelError, WeightsError
from tpplan.core.mesh import Mesh
from tpplan.train.materialize import local_box, local_part
from tpplan.train.weight_sources import SafetensorsFiles

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

EVERY_WAY = ("state_dict", "one file", "index", "constructor")


def reference() -> FusedModel:
    """With values in its buffers, too, that no constructor makes."""
    torch.manual_seed(11)
    model = build_model()
    model.num_tokens.fill_(123.0)
    return model


def on_meta() -> FusedModel:
    with torch.device("meta"):
        return build_model()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_holds(model: nn.Module, expected: nn.Module) -> None:
    """The same values, the box of each local part, ties, and a forward that runs."""
    found, values = dict(model.named_parameters()), dict(expected.named_parameters())
    assert found.keys() == values.keys()
    for name, parameter in found.items():
        assert torch.equal(whole(parameter.detach()), values[name].detach()), name
        assert torch.equal(local_part(parameter), values[name].detach()[local_box(parameter)]), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    share, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    with torch.no_grad():
        ids, targets = batch(0)
        assert torch.isfinite(loss_of(model, ids, targets)), (share, rank)
        assert abs(loss_of(model, ids, targets) - loss_of(expected, ids, targets)) < 1e-5


# ---- the three ways, on real ranks


def fill(how: str, folder: Path, model: nn.Module) -> None:
    match how:
        case "state_dict":
            weights = torch.load(folder / "model.pt", mmap=True, weights_only=True)
            tpplan.load_state_dict(model, weights, build_model=build_model)
        case "one file":
            tpplan.load_safetensors(model, folder / "one", build_model=build_model)
        case "index":
            tpplan.load_safetensors(model, folder / "several", build_model=build_model)
        case "constructor":
            tpplan.init_weights(model, build_model, seed=4)


def filled_on_ranks(mesh: Mesh, folder: Path, ways: tuple[str, ...], expected: dict[str, nn.Module]) -> None:
    for how in ways:
        model = on_meta()
        apply_plan(model, plan_for(model, mesh))
        assert all(local_part(parameter).is_meta for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the parameters stay the same objects
        fill(how, folder, model)
        assert_holds(model, expected[how])
        loss_of(
            model, *(part.chunk(mesh.data_parallel)[mesh.data_rank(dist.get_rank())] for part in batch(0))
        ).backward()
        before = whole(model.embedding.weight.detach()).clone()
        optimizer.step()
        assert not torch.equal(whole(model.embedding.weight.detach()), before)


def save_everywhere(model: nn.Module, folder: Path) -> None:
    """As torch saves it, as one safetensors file without the tied name, and as two with an index."""
    from safetensors.torch import save_file

    torch.save(model.state_dict(), folder / "model.pt")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "head.weight"}
    for name in ("one", "several"):
        (folder / name).mkdir()
    save_file(tensors, folder / "one" / "model.safetensors")
    halves = {f"model-{part}-of-2.safetensors": dict(list(tensors.items())[part::2]) for part in range(2)}
    for file, half in halves.items():
        save_file(half, folder / "several" / file)
    weight_map = {name: file for file, half in halves.items() for name in half}
    (folder / "several" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("safetensors")
    folder = tmp_path_factory.mktemp("weights")
    save_everywhere(reference(), folder)
    return folder


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        (Mesh(tp=2), EVERY_WAY),
        (Mesh(shard=3), ("index", "constructor")),
        pytest.param(Mesh(shard=2, tp=2), EVERY_WAY, marks=pytest.mark.slow),
        pytest.param(Mesh(replicate=2, tp=2), ("index", "constructor"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_way_gives_each_rank_its_part(mesh: Mesh, ways: tuple[str, ...], saved: Path) -> None:
    alone = on_meta()
    tpplan.init_weights(alone, build_model, seed=4)  # in one process, without a plan
    expected = dict.fromkeys(EVERY_WAY, reference()) | {"constructor": alone}
    run_ranks(mesh.num_gpus, filled_on_ranks, mesh, saved, ways, expected)


def test_a_model_with_memory_is_filled_in_place(saved: Path) -> None:
    model = build_model()
    weight = model.layers[0].attention.qkv.weight
    pointer = weight.data_ptr()
    tpplan.load_safetensors(model, saved / "one")
    assert_holds(model, reference())
    assert model.layers[0].attention.qkv.weight is weight
    assert weight.data_ptr() == pointer


def test_values_are_cast_to_the_models_dtypes(saved: Path) -> None:
    model = build_model().to(torch.bfloat16)
    tpplan.load_safetensors(model, saved / "one")
    expected = reference()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, dict(expected.named_parameters())[name].to(torch.bfloat16))


def build_hugging_face() -> nn.Module:
    """With grouped heads, rotary buffers, and a head tied to the embedding."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "use_cache": False}
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads))


def load_hugging_face(folder: Path, expected: Tensor) -> None:
    with torch.device("meta"):
        model = build_hugging_face()
    units = tuple(f"model.layers.{number}" for number in range(3))
    apply_plan(model, handmade_plan(model, Mesh(shard=2), units=units))
    tpplan.load_safetensors(model, folder, build_model=build_hugging_face)
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, expected, atol=1e-6)


IDS = torch.arange(12).view(2, 6)


@pytest.mark.slow
def test_what_hugging_face_saved_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = build_hugging_face()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert "lm_head.weight" not in (tmp_path / "model.safetensors.index.json").read_text()
    with torch.no_grad():
        expected = model(IDS).logits
    run_ranks(2, load_hugging_face, tmp_path, expected)


# ---- what a rank allocates


class Allocations(TorchDispatchMode):
    """Storages that ops made, files mapped into memory apart: the largest one, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if type(made) is Tensor and not made.is_meta:
                storage = made.untyped_storage()
                known = self.alive.get(storage._cdata)
                if (known is None or known[0].expired()) and not is_mapped(storage):
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self.alive.values()))
        return result


#: smaller ones are counted without a look at where they are
LOOKED_UP = 256


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """It is part of a safetensors file."""
    pointer = storage.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines() if storage.nbytes() > LOOKED_UP else ():
        if line.endswith(".safetensors"):
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= pointer < int(end, 16):
                return True
    return False


def allocated(mesh: Mesh, folder: Path) -> tuple[int, Allocations, Allocations]:
    """Bytes of this rank's tensors, and what loading and initializing allocate."""
    found = []
    for how in ("index", "constructor"):
        model = on_meta()
        apply_plan(model, plan_for(model, mesh))
        with Allocations() as allocations:
            fill(how, folder, model)
        allocations.alive.clear()
        found.append((allocations.largest, allocations.peak))
    mine = sum(local_part(tensor).nbytes for tensor in (*model.parameters(), *model.buffers()))
    return mine, *found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mapped files")
def test_a_rank_never_holds_more_than_its_parts_and_one_parameter(saved: Path) -> None:
    sizes = {name: parameter.nbytes for name, parameter in reference().named_parameters()}
    largest = max(sizes.values())
    small = largest / 4  # what buffers are made of
    for mine, (load_largest, load_peak), (init_largest, init_peak) in run_ranks(
        4, allocated, Mesh(shard=2, tp=2), saved
    ):
        assert mine < sum(sizes.values()) / 2  # it is sharded at all
        assert load_largest < largest / 2  # never a whole parameter, but for those that no axis cuts
        assert load_peak <= mine + largest / 2 + small
        assert init_largest <= largest
        assert init_peak <= mine + largest + small


# ---- refusals


def refused(how: Callable[[nn.Module], None], error: type[Exception], message: str) -> None:
    model = on_meta()
    with pytest.raises(error, match=message):
        how(model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))  # nothing was touched


def weights(**changes: Tensor | None) -> dict[str, Tensor]:
    state = reference().state_dict() | changes
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.norm.bias": None}, r"the state_dict does not fit the model: missing there: layers\.0\.norm\.bias;"),
        ({"embedding.weight": None, "head.weight": None}, r"missing there: embedding\.weight;"),
        ({"num_tokens": None}, r"missing there: num_tokens;"),
        ({"extra": torch.ones(2)}, r"not in the model: extra; `ignore` takes patterns"),
        (
            {"layers.1.mlp.down.bias": torch.ones(3)},
            r"of another shape: layers\.1\.mlp\.down\.bias is \[3\] there and \[10\] in the model",
        ),
    ],
)
def test_what_does_not_match_is_named(changes: dict[str, Tensor | None], message: str) -> None:
    refused(
        lambda model: tpplan.load_state_dict(model, weights(**changes), build_model=build_model), WeightsError, message
    )


def test_ties_that_differ_and_other_kinds_of_numbers_are_refused() -> None:
    differing = weights(**{"head.weight": reference().head.weight.detach() + 1})
    with pytest.raises(WeightsError, match=r"embedding\.weight and head\.weight are tied in the model, and differ"):
        tpplan.load_state_dict(build_model(), differing)
    quantized = weights(**{"layers.0.norm.bias": torch.ones(10, dtype=torch.int8)})
    with pytest.raises(WeightsError, match=r"layers\.0\.norm\.bias is torch\.int8 there and torch\.float32 in"):
        tpplan.load_state_dict(build_model(), quantized)


def test_names_can_be_translated_and_left_out() -> None:
    renamed = {f"base.{name}": tensor for name, tensor in weights().items()} | {"base.old.inv_freq": torch.ones(3)}
    model = on_meta()
    tpplan.load_state_dict(
        model, renamed, build_model=build_model, rename=lambda name: f"base.{name}", ignore=["*.inv_freq"]
    )
    assert_holds(model, reference())


def test_buffers_that_nobody_saved_need_the_constructor() -> None:
    message = r"buffers without memory, which no state_dict holds: layers\.0\.attention\.angles, layers\.1\.atten"
    refused(lambda model: tpplan.load_state_dict(model, weights()), ModelError, message)


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(4), persistent=False)


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


def test_values_that_are_lost_are_not_invented() -> None:
    with torch.device("meta"):
        drawn, unset = Drawn(), Unset()
    with pytest.raises(ModelError, match="directions is drawn at random by the constructor and saved nowhere"):
        tpplan.load_state_dict(drawn, {}, build_model=Drawn)
    with pytest.raises(ModelError, match="build_model leaves parameters as it found them in memory: weight"):
        tpplan.init_weights(unset, Unset)


def test_files_that_do_not_fit_are_named(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match=r"empty: no \*\.safetensors there"):
        SafetensorsFiles.open(tmp_path / "empty")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((saved / "one" / "model.safetensors").read_bytes()[:50])
    with pytest.raises(WeightsError, match=r"broken\.safetensors: cannot be read as safetensors"):
        SafetensorsFiles.open(broken)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"none": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"gone\.safetensors: no such file"):
        SafetensorsFiles.open(tmp_path)
    os.symlink(saved / "one" / "model.safetensors", tmp_path / "gone.safetensors")
    with pytest.raises(WeightsError, match="the index says that it holds none, and it does not"):
        SafetensorsFiles.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(WeightsError, match="expected JSON with a weight_map of names to files"):
        SafetensorsFiles.open(tmp_path)


def one_rank_has_other_weights(saved: Path) -> str:
    model = on_meta()
    apply_plan(model, plan_for(model, Mesh(tp=2)))
    name = "nowhere" if dist.get_rank() == 1 else "one"
    with pytest.raises(WeightsError) as raised:
        tpplan.load_safetensors(model, saved / name, build_model=build_model)
    with pytest.raises(WeightsError, match="the ranks have different seeds or constructors: rank 0 has seed 0 with"):
        tpplan.init_weights(model, build_model, seed=dist.get_rank())
    return str(raised.value)


def test_one_ranks_error_is_raised_on_all(saved: Path) -> None:
    first, second = run_ranks(2, one_rank_has_other_weights, saved)
    assert first == f"rank 1: {second}"
    assert second.endswith("nowhere: no *.safetensors there: pass a safetensors file, or a folder with some")
