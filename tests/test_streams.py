"""Whole weights out of a model and into one: bitwise, on every mesh, and nobody waits for who has left."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from examples.parallel.model import Experts, Layer, Llama, tensor_parallel
from mfsdp.checkpoints.streams import ParamMeta, WeightStream
from tests.helpers.experts import sharded
from tests.helpers.largest import Largest
from tests.helpers.models import MLP, Lumpy
from tests.helpers.strategies import sharding

BF16 = torch.bfloat16


class Everything(nn.Module):
    """Tied, frozen, stacked, uneven; buffers that persist in floating point and in integers, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 12), nn.Linear(12, 13, bias=False)
        self.head.weight = self.embed.weight
        self.lumpy, self.mlp = Lumpy(), MLP(12, 7)
        self.experts = nn.Parameter(torch.randn(3, 5, 6))
        self.mlp.up.requires_grad_(False)
        self.mlp.register_buffer("bias", torch.randn(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embed(ids))) + self.experts.sum() * 0.01


def built(place: str = "optim_grads_params", **more: Any) -> tuple[Any, Any]:
    """An unsharded model, with values that its initialisers would not give, and the same sharded."""
    torch.manual_seed(0)
    reference = Everything()
    return reference, mfsdp.fully_shard(copy.deepcopy(reference), units=["lumpy", "mlp"], **sharding(place, **more))


def whole(model: nn.Module, dtype: torch.dtype | None = BF16) -> dict[str, torch.Tensor]:
    """What a stream gives: tied ones once, floating-point ones cast."""
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    state.pop("head.weight", None)
    return {n: t.detach().to(dtype if dtype and t.is_floating_point() else t.dtype) for n, t in state.items()}


def wrong(stream: WeightStream, want: dict[str, torch.Tensor]) -> list[str]:
    """What a pass gives that is not wanted here."""
    got = list(stream)
    if not stream.consumes:
        return [name for name, _ in got]
    said = [(name, t.dtype, tuple(t.shape)) for name, t in got]
    faults = ["metadata"] if said != [tuple(m) for m in stream.metadata()] else []
    faults += sorted({name for name, _ in got} ^ want.keys())
    return faults + [n for n, t in got if t.dtype is not want[n].dtype or not torch.equal(t, want[n])]


def every_mesh() -> list[str]:
    faults = []
    places = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp", "hfsdp of optim_grads")
    for place in places:
        _, model = built(place)
        want = whole(model)
        for to in (None, 0, 3, (0, 3), (1, 2)):
            found = wrong(mfsdp.stream_weights(model, BF16, to=to, prefetch=len(place) % 3), want)
            faults += [f"{place} to {to}: {name}" for name in found]
        faults += [f"{place}: {name}" for name in wrong(mfsdp.stream_weights(model), whole(model, None))]
        only = mfsdp.stream_weights(model, BF16, only=lambda name: name.startswith("mlp.down"))
        faults += [f"{place}, only: {n}" for n in wrong(only, {n: t for n, t in want.items() if "down" in n})]
    return faults


def beside_others() -> list[str]:
    """Tensor and expert parallelism: pieces come whole."""
    faults = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    cut = Llama()
    tensor_parallel(cut, mesh["tp"])
    mfsdp.fully_shard(cut, mesh=mesh, units=[Layer])
    _, mixture = sharded(2)
    for name, model in (("tp", cut), ("ep", mixture)):
        want = whole(model)
        for to in (None, 0, 3, (1, 2)):
            faults += [f"{name} to {to}: {n}" for n in wrong(mfsdp.stream_weights(model, BF16, to=to), want)]
        new = {n: torch.randn_like(t, dtype=torch.float32) for n, t in _from_first(want).items()}
        mfsdp.load_stream(model, new if dist.get_rank() == 3 else None, from_rank=3)
        new = _from_first(new, 3)
        faults += [f"{name} in: {n}" for n, t in whole(model, None).items() if not torch.equal(t, new[n])]
    assert any(isinstance(m, Experts) for m in mixture.modules())
    return faults


def on_some_ranks() -> list[str]:
    """A stage of a pipeline, on two of four ranks; and FSDP2's own shards, on all."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    theirs, rank = MLP(), dist.get_rank()
    for module in (theirs.up, theirs):
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    want = whole(theirs)
    faults = [f"FSDP2 to {to}: {n}" for to in (None, 2) for n in wrong(mfsdp.stream_weights(theirs, BF16, to=to), want)]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage = mfsdp.fully_shard(MLP(), mesh=mesh["dp_shard"], units=["up"])
    if rank < 2:
        return faults
    given = {name: t.float() for name, t in want.items()} if rank == 3 else None
    assert mfsdp.load_stream(stage, given, from_rank=3) == ([], [])
    faults += [f"stage: {name}" for to in (None, 3) for name in wrong(mfsdp.stream_weights(stage, BF16, to=to), want)]
    with pytest.raises(ValueError, match=r"to=\[0, 1\], and none of these ranks holds unit"):
        list(mfsdp.stream_weights(stage, to=(0, 1)))
    assert "from_rank=0 does not hold the model; its ranks are [2, 3]" in told(stage, given, from_rank=0)
    return faults


def _from_first(state: dict[str, torch.Tensor], rank: int = 0) -> dict[str, torch.Tensor]:
    said = [state]
    dist.broadcast_object_list(said, rank)
    return said[0]


def into_every_mesh() -> list[str]:
    """From all ranks and from one, between shardings; forward then reads the new values."""
    faults = []
    torch.manual_seed(5)
    other = Everything()
    ids = torch.arange(6)
    for place in ("no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp"):
        _, model = built(place)
        with torch.no_grad():
            model(ids)  # persistent parameters have been gathered
        if place in ("optim", "hsdp"):
            mine = whole(other, None) if dist.get_rank() == 2 else None
            assert mfsdp.load_stream(model, mine, from_rank=2) == ([], [])
        elif place == "hfsdp":  # from another sharding
            source = mfsdp.fully_shard(copy.deepcopy(other), units=["mlp"])
            with torch.inference_mode():
                mfsdp.load_stream(model, mfsdp.stream_weights(source))
        else:
            mfsdp.load_stream(model, mfsdp.stream_weights(other))
        faults += [f"{place}: {n}" for n, t in whole(model, None).items() if not torch.equal(t, whole(other, None)[n])]
        with torch.no_grad():
            if not torch.allclose(model(ids), other(ids), atol=1e-6):
                faults.append(f"{place}: forward")
    return faults


@pytest.mark.dist
@pytest.mark.parametrize("name", ["every_mesh", "beside_others", "into_every_mesh", "on_some_ranks"])
def test_every_rank_gets_what_it_asks_for(four_ranks, name):
    assert four_ranks.run(globals()[name]) == [[]] * 4


# Leaving


class Stop(Exception):
    pass


def _break(stream: WeightStream) -> None:
    for i, _ in enumerate(stream):
        if i == 1:
            break


def _raise(stream: WeightStream) -> None:
    try:
        for i, _ in enumerate(stream):
            if i == 1:
                raise Stop
    except Stop:
        pass


def _drop(stream: WeightStream) -> None:
    pairs = iter(stream)
    next(pairs)
    del pairs


def _cycle(stream: WeightStream) -> None:
    pairs: list[Any] = [iter(stream)]
    pairs.append(pairs)
    next(pairs[0])
    del pairs
    gc.collect()


def _converter(stream: WeightStream) -> None:
    def convert(unit: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise Stop

    stream.convert = convert
    with pytest.raises(Stop):
        list(stream)


LEAVING: tuple[Callable[[WeightStream], None], ...] = (_break, _raise, _drop, _cycle, _converter)


def leaving() -> list[str]:
    """On one rank only; the next collectives are in step on all."""
    faults = []
    _, model = built()
    want = whole(model)
    for leave in LEAVING:
        for to in (None, 1):
            stream = mfsdp.stream_weights(model, BF16, to=to)
            if dist.get_rank() == 1:
                leave(stream)
            elif [n for n, _ in stream] != ([] if to else [m.name for m in stream.metadata()]):
                faults.append(f"{leave.__name__} to {to}")
            faults += wrong(mfsdp.stream_weights(model, BF16, to=0), want)
    return faults


def anywhere() -> list[str]:
    """Two at once, in each mode and context, between forward and backward; training does not notice."""
    reference, model = built("optim_grads")
    want, ids, faults = whole(model), torch.arange(6), []
    first, second = mfsdp.stream_weights(model, BF16), mfsdp.stream_weights(model, BF16, prefetch=0)
    for (n, a), (m, b) in zip(first, second, strict=True):
        faults += [] if n == m and torch.equal(a, b) and a.data_ptr() != b.data_ptr() else [f"two at once: {n}"]
    for mode in (torch.no_grad, torch.inference_mode, lambda: mfsdp.unsharded(model)):
        with mode():
            faults += wrong(mfsdp.stream_weights(model, BF16, to=1), want)
    with mfsdp.summon_full_params(model, writeback=False), torch.no_grad():
        model.mlp.down.weight.add_(1)  # an edit that others see
        summoned = dict(mfsdp.stream_weights(model, only=lambda n: n == "mlp.down.weight"))
        faults += [] if torch.equal(summoned["mlp.down.weight"], model.mlp.down.weight) else ["summoned"]
    loss = model(ids).square().mean()
    for name, tensor in mfsdp.stream_weights(model, torch.float32):
        assert torch.is_grad_enabled() and not tensor.requires_grad, name
        tensor.zero_()  # the stream's own memory
    loss.backward()
    reference(ids).square().mean().backward()
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if q.grad is not None and not torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6):
            faults.append(f"gradient of {n}")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return faults + wrong(first, whole(model))  # the weights of now


def memory() -> tuple[int, int, int, int]:
    """The most bytes beside the shards, with its rank; those of a unit, and of the model, in bf16."""
    model = mfsdp.fully_shard(nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16))), units=[nn.Linear])
    with Largest() as seen:
        for _, tensor in mfsdp.stream_weights(model, BF16, to=0, prefetch=0):
            del tensor
    size = 128 * 128 * 2
    return dist.get_rank(), seen.most - 16 * size, size, 16 * size  # without the shards


def two() -> list[str]:
    faults = leaving() + anywhere()
    rank, most, unit, model = memory()
    bound = 2.2 * unit if rank == 0 else 0.6 * unit  # one that takes nothing: its rows
    return faults + ([] if most < bound < model / 4 else [f"rank {rank} held {most} of {model}"])


@pytest.mark.dist
def test_leaving_and_modes_and_memory(two_ranks):
    assert two_ranks.run(two) == [[], []]


# In: what is refused, and what is told


class Source:
    """What its metadata says, and what it gives."""

    def __init__(self, state: dict[str, torch.Tensor], fails: int = -1, shape: tuple[int, ...] | None = None):
        self.state, self.fails, self.shape = state, fails, shape

    def metadata(self) -> list[Any]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self.state.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(self.state.items()):
            if i == self.fails:
                raise Stop
            yield name, tensor if self.shape is None else tensor.new_zeros(self.shape)


def told(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    try:
        mfsdp.load_stream(model, *args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> list[str]:
    """By what refuses; the model is unchanged, and after a failure in the middle it does not compute."""
    reference, model = built()
    before, rank = whole(model, None), dist.get_rank()
    good = whole(reference, None)
    here = rank == 0
    bad = {**good, "experts": torch.zeros(3, 5, 7)}
    out = [
        told(model, {n: t for n, t in good.items() if n != "count"} | {"more": torch.ones(1)}),
        told(model, bad),
        told(model, {**good, "count": torch.tensor(3.0)}),
        told(model, model.state_dict()),
        told(model, iter(good.items())),
        told(model, mfsdp.stream_weights(reference), from_rank=2),
        told(model, iter([]) if here else None, from_rank=0),
        told(model, bad if here else None, from_rank=0),
        told(model, mfsdp.stream_weights(model) if here else None, from_rank=0),
    ]
    with mfsdp.unsharded(model):
        out.append(told(model, good))
    after = whole(model, None)
    assert all(torch.equal(before[n], after[n]) for n in before), "nothing is written"
    model(torch.arange(6))
    out += [told(model, Source(good, fails=4) if here else None, from_rank=0)]
    out += [told(model, good) + told(model, Source(good, shape=(1, 1)))]
    try:
        list(mfsdp.stream_weights(model))
    except RuntimeError as error:
        out.append(str(error))
    assert mfsdp.load_stream(model, {n: good[n] for n in ("experts", "count")}, strict=False)[0]
    model(torch.arange(6))
    try:
        list(mfsdp.stream_weights(model, BF16 if here else None))
    except RuntimeError as error:
        out.append(f"{type(error).__name__}: {error}")
    return out


@pytest.mark.dist
def test_what_does_not_fit_is_refused_before_anything_is_written(two_fresh_ranks):
    want = [
        "missing in the source: count; not in the model: more", r"experts is [3, 5, 7] in the source, [3, 5, 6] in",
        "count is torch.float32 in the source, torch.int64 in the model", "not whole tensors",
        "has no metadata()", "ranks are 0 to 1",
        "has no metadata()", "experts is [3, 5, 7]", "leave out from_rank", "Leave mfsdp.unsharded first", "",
        "where its metadata() says", "half loaded", "DesyncError",
    ]  # fmt: skip
    first, second = two_fresh_ranks.run(refusals)
    for got in (first, second):
        assert len(got) == len(want)
        assert all(part in text for part, text in zip(want, got)), list(zip(want, got))
    assert "Stop" in first[10] and "the source of rank 0 failed" in second[10]


# One process


class Engine:
    """Sends as vLLM's documentation of its trainer engines says (training/weight_transfer/base): metadata first on
    every rank, then every rank iterates, and what comes must be what was announced.
    """

    def __init__(self, source: Any, sends: bool):
        self.source, self.sends, self.received = source, sends, dict[str, torch.Tensor]()

    def send_weights(self) -> None:
        said = self.source.metadata()
        if not self.sends:
            for _ in self.source:
                pass
            return
        info = {"names": [m.name for m in said], "shapes": [list(m.shape) for m in said],
                "dtype_names": [str(m.dtype).split(".")[-1] for m in said]}  # fmt: skip
        given = iter(self.source)
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            got, tensor = next(given)
            assert got == name and tensor.dtype is getattr(torch, dtype) and list(tensor.shape) == shape
            assert tensor.is_contiguous()
            self.received[name] = tensor.clone()
        assert next(given, None) is None


def transferred(folder: str) -> list[str]:
    """Mixtral, to the names and shapes of the hub, twice with a step in between."""
    from mfsdp.integrations.hub_names import hub_names
    from tests.helpers.models import mixtral

    torch.manual_seed(0)
    reference: Any = mixtral()
    model: Any = mfsdp.fully_shard(copy.deepcopy(reference), units="auto")
    source = mfsdp.stream_weights(model, torch.float32, to=0, convert=hub_names(model))
    engine, faults = Engine(source, dist.get_rank() == 0), []
    for _ in range(2):
        engine.send_weights()
        if dist.get_rank() == 0:
            from safetensors.torch import load_file

            reference.save_pretrained(folder)
            want = load_file(f"{folder}/model.safetensors")
            assert any("experts.5.w1" in name for name in want)
            faults += sorted(want.keys() ^ engine.received.keys())
            faults += [n for n, t in want.items() if not torch.equal(engine.received[n], t)]
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p.mul_(1.5)
    return faults


@pytest.mark.dist
def test_a_trainer_engine_gets_names_and_shapes_of_the_hub(two_ranks, tmp_path):
    assert two_ranks.run(transferred, str(tmp_path)) == [[], []]


def test_what_hub_names_cannot_make_of_a_unit_is_refused():
    import transformers.core_model_loading as loading

    from mfsdp.integrations.hub_names import hub_names
    from tests.helpers.models import llama

    model: Any = llama()
    joins = loading.WeightConverter("mlp.gate_up.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
                                    operations=[loading.Chunk(dim=0)])  # fmt: skip
    model._weight_conversions = [joins]
    names = {m.name for m in mfsdp.stream_weights(model, convert=hub_names(model)).metadata()}
    assert "model.layers.0.mlp.gate_up.weight" in names
    mfsdp.fully_shard(model, units=[nn.Linear])
    with pytest.raises(ValueError, match=r"gate_up.weight cannot be made of model.layers.0.mlp.*alone: choose units"):
        mfsdp.stream_weights(model, convert=hub_names(model)).metadata()
    with pytest.raises(TypeError, match="MLP is not a transformers model"):
        hub_names(MLP())


def test_a_model_that_is_not_sharded_is_its_own_stream():
    reference = Everything()
    stream = mfsdp.stream_weights(torch.compile(reference, backend="eager"), BF16)
    assert wrong(stream, whole(reference)) == [] and wrong(stream, whole(reference)) == []
    for _, tensor in mfsdp.stream_weights(reference):
        tensor.fill_(7)
    assert reference.count == 3, "copies"
    twin = mfsdp.fully_shard(Everything())
    assert mfsdp.load_stream(twin, stream, from_rank=0) == ([], [])
    assert torch.equal(whole(twin)["experts"], whole(reference)["experts"])


@pytest.mark.parametrize(
    "given, match",
    [
        ({"dtype": torch.int8}, "dtype=torch.int8"), ({"to": 1}, "to=1: give a rank"), ({"to": True}, "to=True"),
        ({"to": ()}, r"to=\(\)"), ({"prefetch": -1}, "prefetch=-1"), ({"only": "mlp"}, "only='mlp' must be a function"),
        ({"convert": "hub"}, "convert='hub' must be a function"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        mfsdp.stream_weights(Everything(), **given)


def test_two_tensors_of_one_name_are_refused():
    stream = mfsdp.stream_weights(Everything(), convert=lambda unit: [("same", t) for t in unit.values()])
    with pytest.raises(ValueError, match="two tensors are called 'same'"):
        stream.metadata()


def run_example() -> str:
    """What the example prints; of a rank that has its process group already."""
    from examples.stream import train

    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT),
    ):
        train.main(argparse.Namespace(rounds=11, batch=32, lr=1e-2))
    return printed.getvalue()


@pytest.mark.dist
def test_the_example_learns_from_what_its_copies_generate(two_ranks):
    rewards = [float(x) for x in re.findall(r"reward ([0-9.]+)", two_ranks.run(run_example)[0])]
    assert len(rewards) == 2 and rewards[0] < 0.2 and rewards[1] > 0.8
