"""Ways to change a plan's JSON for scripts/evidence/adversary.py: what an adversary does, or someone careless."""

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

Data = dict[str, Any]
Mutation = Callable[[Data, Data, random.Random], None]

LAYOUTS = ("R", "R*", "P", "S(0)", "S(1)", "S(2)", "S(0)/2", "S(1)/2")
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "bool")
#: what a mutation that finds nothing to change raises
NOTHING = (IndexError, KeyError, ValueError)

MUTATIONS: dict[str, Mutation] = {}


def mutation(name: str) -> Callable[[Mutation], Mutation]:
    def registered(function: Mutation) -> Mutation:
        MUTATIONS[name] = function
        return function

    return registered


def mutated(data: Data, other: Data, rng: random.Random) -> tuple[str, Data]:
    """The kinds of one to three changes, and the changed data; sections may be taken of the plan `other`."""
    found, kinds = copy.deepcopy(data), list[str]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        for kind in rng.sample(sorted(MUTATIONS), len(MUTATIONS)):
            before = copy.deepcopy(found)
            try:
                MUTATIONS[kind](found, other, rng)
            except NOTHING:
                found = before
                continue
            if found != before:
                kinds.append(kind)
                break
    return "+".join(kinds), found


def layouts_in(data: Data) -> list[str]:
    """Layouts that the plan names."""
    text = str([data["parameters"], data["boundaries"], data["outputs"]])
    return sorted(set(re.findall(r"R\*|R\b|P\b|S\([^()]*\)(?:/\d+)?", text)))


def layout(data: Data, rng: random.Random) -> str:
    return rng.choice([*LAYOUTS, *layouts_in(data)])


def parameter(data: Data, rng: random.Random) -> Data:
    found: Data = data["parameters"][rng.choice(sorted(data["parameters"]))]
    return found


def crossing(data: Data, rng: random.Random) -> tuple[MutableMapping[str, str], str]:
    """The table and the path of one conversion."""
    every = [
        (table, path)
        for _, boundary in sorted(data["boundaries"].items())
        for table in (boundary["inputs"], boundary["outputs"])
        for path in sorted(table)
    ]
    return rng.choice(every)


def with_sides(text: str, source: str | None = None, target: str | None = None, dtype: str | None = None) -> str:
    """A conversion with a part replaced."""
    match = re.fullmatch(r"(.*) -> (.*) as (.*)", text)
    assert match is not None
    return f"{source or match[1]} -> {target or match[2]} as {dtype or match[3]}"


def sides(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*) -> (.*) as (.*)", text)
    assert match is not None
    return match[1], match[2]


# ---- parameters


@mutation("placement")
def _placement(data: Data, other: Data, rng: random.Random) -> None:
    parameter(data, rng)["placement"] = layout(data, rng)


@mutation("placement and reads")
def _placement_and_reads(data: Data, other: Data, rng: random.Random) -> None:
    one, chosen = parameter(data, rng), layout(data, rng)
    one["placement"] = chosen if chosen not in ("R*", "P") else "R"
    one["reads"] = dict.fromkeys(one["reads"], chosen)


@mutation("swap of two placements")
def _swap(data: Data, other: Data, rng: random.Random) -> None:
    one, two = parameter(data, rng), parameter(data, rng)
    one["placement"], two["placement"] = two["placement"], one["placement"]


@mutation("swap of two parameters")
def _swap_whole(data: Data, other: Data, rng: random.Random) -> None:
    one, two = parameter(data, rng), parameter(data, rng)
    for key in ("placement", "reads"):
        one[key], two[key] = two[key], one[key]


@mutation("read layout")
def _read(data: Data, other: Data, rng: random.Random) -> None:
    reads = parameter(data, rng)["reads"]
    reads[rng.choice(sorted(reads))] = layout(data, rng)


@mutation("read's module")
def _reader(data: Data, other: Data, rng: random.Random) -> None:
    reads = parameter(data, rng)["reads"]
    reads[rng.choice(modules(data))] = reads.pop(rng.choice(sorted(reads)))


@mutation("read dropped")
def _read_dropped(data: Data, other: Data, rng: random.Random) -> None:
    reads = parameter(data, rng)["reads"]
    del reads[rng.choice(sorted(reads))]


@mutation("R and R*")
def _halves(data: Data, other: Data, rng: random.Random) -> None:
    """A value's gradient is taken for a summand, or for the whole."""
    one = parameter(data, rng)
    reads = [key for key, value in one["reads"].items() if value in ("R", "R*")]
    if rng.random() < 0.5 and reads:
        key = rng.choice(sorted(reads))
        one["reads"][key] = {"R": "R*", "R*": "R"}[one["reads"][key]]
        return
    table, path = crossing(data, rng)
    source, target = sides(table[path])
    turned = {"R": "R*", "R*": "R"}
    if rng.random() < 0.5:
        table[path] = with_sides(table[path], target=turned[target])
    else:
        table[path] = with_sides(table[path], source=turned[source])


@mutation("shape or dtype")
def _shape(data: Data, other: Data, rng: random.Random) -> None:
    one = parameter(data, rng)
    match rng.choice(("shape", "dtype", "trainable")):
        case "shape":
            at = rng.randrange(len(one["shape"]))
            one["shape"][at] = rng.choice((one["shape"][at] * 2, one["shape"][at] // 2, 0, 1))
        case "dtype":
            one["dtype"] = rng.choice(DTYPES)
        case _:
            one["trainable"] = not one["trainable"]


@mutation("aliases")
def _aliases(data: Data, other: Data, rng: random.Random) -> None:
    one = parameter(data, rng)
    if one["aliases"] and rng.random() < 0.7:
        one["aliases"].pop()
    else:
        one["aliases"].append(rng.choice(sorted(data["parameters"])))


@mutation("parameter dropped or renamed")
def _parameter_renamed(data: Data, other: Data, rng: random.Random) -> None:
    name = rng.choice(sorted(data["parameters"]))
    one = data["parameters"].pop(name)
    if rng.random() < 0.6:
        data["parameters"][rng.choice((name + "x", name.replace("*", "0"), rng.choice(sorted(data["parameters"]))))] = (
            one
        )


# ---- boundaries


def modules(data: Data) -> list[str]:
    """Names that the plan uses for modules."""
    names = set(data["boundaries"]) | {name.rpartition(".")[0] for name in data["parameters"]} | {"<root>"}
    return sorted(names - {""})


@mutation("conversion")
def _conversion(data: Data, other: Data, rng: random.Random) -> None:
    table, path = crossing(data, rng)
    side = rng.choice(("source", "target", "both"))
    if side != "target":
        table[path] = with_sides(table[path], source=layout(data, rng))
    if side != "source":
        table[path] = with_sides(table[path], target=layout(data, rng))


@mutation("conversion turned round")
def _turned(data: Data, other: Data, rng: random.Random) -> None:
    table, path = crossing(data, rng)
    source, target = sides(table[path])
    table[path] = with_sides(table[path], source=target, target=source)


@mutation("conversion dropped")
def _dropped(data: Data, other: Data, rng: random.Random) -> None:
    table, path = crossing(data, rng)
    del table[path]


@mutation("conversion added")
def _added(data: Data, other: Data, rng: random.Random) -> None:
    name = rng.choice(modules(data))
    boundary = data["boundaries"].setdefault(name, {"inputs": {}, "outputs": {}})
    which = rng.choice(("inputs", "outputs"))
    paths = [path for each in data["boundaries"].values() for path in (*each["inputs"], *each["outputs"])]
    path = rng.choice(sorted({*paths, "x", "out", "0"}))
    boundary[which].setdefault(path, f"{layout(data, rng)} -> {layout(data, rng)} as float32")


@mutation("conversion moved")
def _moved(data: Data, other: Data, rng: random.Random) -> None:
    table, path = crossing(data, rng)
    text = table.pop(path)
    boundary = data["boundaries"].setdefault(rng.choice(modules(data)), {"inputs": {}, "outputs": {}})
    boundary[rng.choice(("inputs", "outputs"))][path] = text


@mutation("layout between two conversions")
def _between(data: Data, other: Data, rng: random.Random) -> None:
    """What one conversion makes and others begin with becomes another layout, in all of them or in some."""
    table, path = crossing(data, rng)
    old, new = sides(table[path])[1], layout(data, rng)
    share = rng.choice((1.0, 0.5))
    for boundary in data["boundaries"].values():
        for each in (boundary["inputs"], boundary["outputs"]):
            for key, text in each.items():
                source, target = sides(text)
                if source == old and rng.random() < share:
                    each[key] = with_sides(each[key], source=new)
                if target == old and rng.random() < share:
                    each[key] = with_sides(each[key], target=new)


@mutation("crossing dtype")
def _crossing_dtype(data: Data, other: Data, rng: random.Random) -> None:
    table, path = crossing(data, rng)
    table[path] = with_sides(table[path], dtype=rng.choice(DTYPES))


@mutation("layouts exchanged everywhere")
def _everywhere(data: Data, other: Data, rng: random.Random) -> None:
    """One layout is written where another stood, in parameters and boundaries."""
    old, new = rng.choice(layouts_in(data)), layout(data, rng)

    def changed(text: str) -> str:
        return re.sub(rf"(?<![\w*]){re.escape(old)}(?![\w*/(])", new, text)

    for one in data["parameters"].values():
        one["reads"] = {key: changed(value) for key, value in one["reads"].items()}
        one["placement"] = changed(one["placement"]) if new not in ("R*", "P") else one["placement"]
    for boundary in data["boundaries"].values():
        for each in (boundary["inputs"], boundary["outputs"]):
            each.update({key: changed(text) for key, text in each.items()})


@mutation("parts")
def _parts(data: Data, other: Data, rng: random.Random) -> None:
    """Widths of what lies side by side in a fused weight."""
    every = [
        (table, key)
        for one in data["parameters"].values()
        for table, keys in ((one, ("placement",)), (one["reads"], tuple(one["reads"])))
        for key in keys
        if table[key].startswith("S(")
    ]
    table, key = rng.choice(every)
    match = re.fullmatch(r"S\((\d)(?:; (.*))?\)(?:/\d+)?", table[key])
    if match is None:
        raise ValueError
    parts = [int(part) for part in (match[2] or "").split(",") if part.strip()] or [rng.choice((8, 16, 32))] * 2
    match rng.choice(("swap", "join", "cut", "shift")):
        case "swap":
            rng.shuffle(parts)
        case "join" if len(parts) > 1:
            parts[:2] = [parts[0] + parts[1]]
        case "cut":
            at = rng.randrange(len(parts))
            parts[at : at + 1] = [parts[at] // 2, parts[at] - parts[at] // 2]
        case _ if len(parts) > 1:
            parts[0], parts[1] = parts[0] + 2, parts[1] - 2
    text = f"S({match[1]}; {', '.join(map(str, parts))})" if len(parts) > 1 else f"S({match[1]})"
    table[key] = text


# ---- the rest


@mutation("outputs")
def _outputs(data: Data, other: Data, rng: random.Random) -> None:
    outputs = data["outputs"]
    match rng.choice(("change", "drop", "add")):
        case "change":
            outputs[rng.choice(sorted(outputs))] = layout(data, rng)
        case "drop":
            del outputs[rng.choice(sorted(outputs))]
        case _:
            outputs[rng.choice(("0", "1", "logits", "loss", "<root>"))] = layout(data, rng)


@mutation("sizes")
def _sizes(data: Data, other: Data, rng: random.Random) -> None:
    lists = data["sizes"]
    name = rng.choice(sorted(lists))
    match rng.choice(("number", "drop", "double", "move", "of", "dims")):
        case "number":
            one = rng.choice(lists[name])
            key = rng.choice(("written", "local", "position", "count"))
            one[key] = rng.choice((one[key] + 1, max(1, one[key] - 1), one[key] * 2, max(1, one[key] // 2)))
        case "drop":
            lists[name].pop(rng.randrange(len(lists[name])))
        case "double":
            lists[name].append(copy.deepcopy(rng.choice(lists[name])))
        case "of":
            one = rng.choice(lists[name])
            one["of"][rng.randrange(len(one["of"]))] = rng.choice((0, 1, 2, 8))
        case "dims":
            one = rng.choice(lists[name])
            one["dims"] = rng.choice((None, [0], [1], [2], [0, 1], [3]))
            if one["dims"] is None:
                del one["dims"]
        case _:
            lists[rng.choice(modules(data))] = lists.pop(name)


@mutation("size added")
def _size_added(data: Data, other: Data, rng: random.Random) -> None:
    shape = [rng.choice((0, 2, 4, 8, 16, 32)) for _ in range(rng.choice((3, 4)))]
    written = rng.choice((2, 4, 8, 16, 32))
    call = rng.choice(("view", "expand", "split", "slice", "narrow", "unflatten", "repeat_interleave"))
    one = {"call": call, "of": shape, "count": len(shape), "position": rng.randrange(len(shape)), "written": written}
    data["sizes"].setdefault(rng.choice(modules(data)), []).append({**one, "local": written // 2})


@mutation("recompute")
def _recompute(data: Data, other: Data, rng: random.Random) -> None:
    data["recompute"][rng.choice([*modules(data), *data["blocks"]])] = rng.choice(("none", "full", "selective"))


@mutation("fsdp")
def _fsdp(data: Data, other: Data, rng: random.Random) -> None:
    fsdp = data["fsdp"]
    match rng.choice(("flip", "drop", "add", "shuffle", "except")):
        case "flip":
            fsdp["reshard_after_forward"] = not fsdp["reshard_after_forward"]
        case "drop":
            fsdp["units"].pop()
        case "add":
            fsdp["units"].append(rng.choice(modules(data)))
        case "except":
            fsdp["exceptions"].append(rng.choice(fsdp["units"]))
        case _:
            rng.shuffle(fsdp["units"])


@mutation("losses and draws")
def _losses(data: Data, other: Data, rng: random.Random) -> None:
    if data["losses"] and rng.random() < 0.5:
        name = rng.choice(sorted(data["losses"]))
        data["losses"][name] = rng.choice((1, data["losses"][name] * 2, max(1, data["losses"][name] // 2)))
    elif data["losses"] and rng.random() < 0.5:
        data["losses"].popitem()
    elif rng.random() < 0.5:
        data["losses"][rng.choice(modules(data))] = rng.choice((32, 33, 48, 64, 256))
    else:
        data["draws"].append(rng.choice(modules(data)))


@mutation("opaque")
def _opaque(data: Data, other: Data, rng: random.Random) -> None:
    opaque = data.get("opaque") or {}
    if opaque and rng.random() < 0.5:
        opaque.popitem()
    else:
        opaque[rng.choice(modules(data))] = {"reason": "edited", "seconds": 0.0, "bodies": []}
    data["opaque"] = opaque


@mutation("collectives")
def _collectives(data: Data, other: Data, rng: random.Random) -> None:
    collectives = data["collectives"]
    match rng.choice(("drop", "count", "kind", "bytes", "double")):
        case "drop":
            collectives.pop(rng.randrange(len(collectives)))
        case "count":
            rng.choice(collectives)["count"] += 1
        case "kind":
            rng.choice(collectives)["kind"] = rng.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
        case "bytes":
            rng.choice(collectives)["num_bytes"] *= 2
        case _:
            collectives.append(copy.deepcopy(rng.choice(collectives)))


@mutation("blocks")
def _blocks(data: Data, other: Data, rng: random.Random) -> None:
    blocks = data["blocks"]
    name = rng.choice(sorted(blocks))
    match rng.choice(("range", "rename", "drop", "less")):
        case "range":
            blocks[name] = rng.choice(("0", "0-1", "0-2", "1", "0-9", "0,1"))
        case "rename":
            blocks["x." + name] = blocks.pop(name)
        case "less":
            blocks[name] = "0"
        case _:
            del blocks[name]


@mutation("one of like layers")
def _unrolled(data: Data, other: Data, rng: random.Random) -> None:
    """One layer of a block gets an entry of its own, which differs."""
    starred = [(section, key) for section in ("parameters", "boundaries") for key in data[section] if "*" in key]
    section, key = rng.choice(sorted(starred))
    one = copy.deepcopy(data[section][key])
    name = key.replace("*", rng.choice("01"), 1)
    if section == "parameters":
        one["placement"] = layout(data, rng)
        one["reads"] = {reader.replace("*", name.split(".")[1], 1): value for reader, value in one["reads"].items()}
    else:
        for table in (one["inputs"], one["outputs"]):
            for path in table:
                table[path] = with_sides(table[path], target=layout(data, rng))
    data[section][name] = one


@mutation("numbers")
def _numbers(data: Data, other: Data, rng: random.Random) -> None:
    holder, key = rng.choice(list(numbers_in(data)))
    value = holder[key]
    holder[key] = (not value) if isinstance(value, bool) else rng.choice((value + 1, value * 2, value // 2, 0, 1))


def numbers_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a number, by what holds it."""
    members = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        if isinstance(member, int | float):
            yield value, key
        yield from numbers_in(member)


@mutation("mesh, batch, precision")
def _setting(data: Data, other: Data, rng: random.Random) -> None:
    match rng.choice(("tp", "axes", "batch", "precision", "seq_len")):
        case "tp":
            data["mesh_degrees"]["tp"] = rng.choice((1, 4))
        case "axes":
            mesh = data["mesh_degrees"]
            mesh["tp"], mesh["shard"] = mesh["shard"], mesh["tp"]
        case "batch":
            data["batch"]["micro_batch"] *= 2
            data["batch"]["global_batch"] *= 2
        case "seq_len":
            data["batch"]["seq_len"] *= 2
        case _:
            data["precision"] = rng.choice(("fp32", "bf16", "bf16-mixed"))


@mutation("proof")
def _proof(data: Data, other: Data, rng: random.Random) -> None:
    proof = data["proof"]
    match rng.choice(("shapes", "assumptions", "hash", "dims")):
        case "shapes":
            proof["other_shapes"][rng.choice(("batch", "length"))] = {"multiple": rng.choice((1, 2, 4))}
        case "assumptions":
            proof["assumptions"] = []
        case "hash":
            proof.pop("plan_hash")
        case _:
            dims = rng.choice(sorted(proof["other_shapes"]["inputs"].items()))[1]
            rng.shuffle(dims)


@mutation("section of another plan")
def _section(data: Data, other: Data, rng: random.Random) -> None:
    """Of another plan of the same model, or of another model."""
    section = rng.choice(
        ("parameters", "boundaries", "sizes", "losses", "outputs", "recompute", "collectives", "proof")
    )
    data[section] = copy.deepcopy(other[section])


@mutation("entry of another plan")
def _entry(data: Data, other: Data, rng: random.Random) -> None:
    section = rng.choice(("parameters", "boundaries"))
    name = rng.choice(sorted(set(other[section]) & set(data[section])))
    data[section][name] = copy.deepcopy(other[section][name])
