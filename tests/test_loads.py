"""Ranks that load different state dicts, or of which only some load one, raise an error (invariant 69)."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.runtime.desync import GroupState
from tests.helpers.parity import whole

Load = Callable[[nn.Module, dict[str, torch.Tensor]], None]


def _by_one(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        model.load_state_dict(full)


def _parts(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    mine = [name for i, name in enumerate(full) if i % 2 == dist.get_rank()]
    model.load_state_dict({name: full[name] for name in mine}, strict=False)


def _others(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({name: value + dist.get_rank() for name, value in full.items()})


def _layer_by_one(model: Any, full: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 1:
        model[0].load_state_dict({"weight": full["0.weight"], "bias": full["0.bias"]})


def _alike(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(full)
    model.load_state_dict({name: value.double() for name, value in full.items()}, assign=dist.get_rank() == 0)
    model.load_state_dict({name: 1 * value for name, value in model.state_dict().items()})


def _broadcast(model: nn.Module, full: dict[str, torch.Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(full) if dist.get_rank() == 0 else {}, options=options)


APART: tuple[Load, ...] = (_by_one, _parts, _others, _layer_by_one)
TOGETHER: tuple[Load, ...] = (_alike, _broadcast)


def loaded(load: Load, compiled: bool, trained: bool, strategy: int) -> str:
    """What forward says behind a load; ``""`` if it gives what the unsharded model gives that all ranks have loaded."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # one that is not lost yet
    model = mfsdp.fully_shard(copy.deepcopy(reference), mesh=mesh, units=[nn.Linear], strategy=strategy)
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if compiled else model
    x = torch.randn(2, 6)
    if trained:
        run(x).sum().backward()
    full = {name: whole(value) * 2 + 1 for name, value in model.state_dict().items()}
    load(model, full)
    reference.load_state_dict(full)
    try:
        out = run(x)
        out.sum().backward()  # without shards nothing is communicated before
        torch.testing.assert_close(out, reference(x))
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return ""


def all_of_it() -> dict[str, str]:
    said = {}
    for compiled, trained, strategy in ((True, True, 3), (False, False, 3), (True, False, 2), (False, True, 0)):
        for load in (*APART, *TOGETHER) if strategy != 2 else (_by_one, _alike):
            said[f"{load.__name__} {compiled} {strategy}"] = loaded(load, compiled, trained, strategy)
    own, GroupState.load = GroupState.load, lambda self, what, digest: None  # type: ignore[method-assign, assignment]
    said["mutated"] = loaded(_by_one, True, True, 3)
    GroupState.load = own  # type: ignore[method-assign]
    return said


@pytest.mark.dist
@pytest.mark.slow
def test_ranks_that_have_not_loaded_alike_are_told_on_all(two_fresh_ranks):
    for said in two_fresh_ranks.run(all_of_it):
        assert "not close" in said.pop("mutated"), "what is compared here is told by nothing else"
        for name, text in said.items():
            if name.startswith(("_alike", "_broadcast")):
                assert not text, (name, text)
            else:
                assert "have loaded different state dicts (invariant 69)" in text and "broadcast_from_rank0" in text, (
                    name,
                    text,
                )


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "foreach": lambda p: torch.optim.NAdam(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "flat": lambda p: mfsdp.fully_shard_optimizer(torch.optim.AdamW(p, 0.1)),
    "streamed": lambda p: mfsdp.fully_shard_optimizer(torch.optim.AdamW(p, 0.1), offload="state"),
}


class Scaled(nn.Module):
    """With parameters of no and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(6, 9), nn.Linear(9, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh()) * self.scale


def plain_state(name: str, alone: bool) -> tuple[float, str]:
    """How far a step is from the unsharded one's, behind a load of the unsharded optimizer's state; what is refused."""
    torch.manual_seed(0)
    reference = Scaled().double()
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = mfsdp.fully_shard(copy.deepcopy(reference), mesh=mesh, units=[nn.Linear])
    theirs = OPTIMIZERS["adamw" if name in ("flat", "streamed") else name](reference.parameters())
    ours = OPTIMIZERS[name](model.parameters())
    x = torch.randn(3, 6).double()

    def step(*pairs: Any) -> None:
        for m, optimizer in pairs:
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()

    step((reference, theirs), (reference, theirs))
    model.load_state_dict(reference.state_dict())
    wrong = copy.deepcopy(theirs.state_dict())
    wrong["state"][1] = {k: v[:3] if v.dim() else v for k, v in wrong["state"][1].items()}
    try:
        ours.load_state_dict(wrong)
        refused = ""
    except ValueError as error:
        refused = str(error)
    if not alone or dist.get_rank() == 0:
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # torch shares "step"
    try:
        step((reference, theirs), (model, ours))
    except RuntimeError as error:
        return 0.0, str(error)
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    return max(float((a - b.full_tensor()).abs().max()) for a, b in pairs), refused


def called_alone(folder: str, what: str) -> str:
    """What a rank is told where rank 0 alone saves or loads, and the other goes on."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
    model = mfsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)
    checkpoints = mfsdp.Checkpoints(folder)
    checkpoints.save(0, model)
    mfsdp.save_safetensors(model, f"{folder}/files")
    try:
        if dist.get_rank() == 0:
            if what == "files":
                mfsdp.load_safetensors(model, f"{folder}/files")
            else:
                checkpoints.save(1, model, blocking=what == "save") if "save" in what else checkpoints.load(model)
        model(torch.ones(2, 4))
    except RuntimeError as error:
        return str(error)
    return ""


def each_alone(folder: str) -> list[tuple[str, str]]:
    found = [(what, called_alone(f"{folder}/{what}", what)) for what in ("save", "save behind", "load", "files")]
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    dist.destroy_process_group()
    model.load_state_dict(nn.Linear(4, 4).state_dict())  # with nobody left to compare with
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_what_one_rank_saves_or_loads_alone_is_told_on_all(two_fresh_ranks, tmp_path):
    for said in two_fresh_ranks.run(each_alone, str(tmp_path), timeout=60):
        for what, text in said:
            words = "invariant 69" if what == "files" else f"invariant 13.*Checkpoints.{what.split()[0]}"
            assert re.search(words, text), (what, text)


@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_an_unsharded_optimizer_is_cut(two_ranks, name):
    for far, refused in two_ranks.run(plain_state, name, False):
        assert far < 1e-8 and "is [3" in refused and "full_state_dict=True" in refused


@pytest.mark.dist
@pytest.mark.slow
def test_state_that_one_rank_loads_is_told(two_fresh_ranks):
    for _, told in two_fresh_ranks.run(plain_state, "adamw", True):
        assert "have loaded different state dicts (invariant 69)" in told


def adapter(folder: str) -> float:
    """How far weights are from those of an adapter that is read into a sharded model, by state dict and from a file."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4))
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["0", "1"], init_lora_weights=False))
    first = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    mfsdp.fully_shard(model, units=[nn.Linear], mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
    worst = 0.0
    for factor in (2.0, 1.0):
        if factor == 1.0:
            model.load_adapter(folder, "default")
        else:
            set_peft_model_state_dict(model, {name: factor * value for name, value in first.items()})
        now = get_peft_model_state_dict(model)
        worst = max(worst, *(float((whole(now[name]) - factor * value).abs().max()) for name, value in first.items()))
    model(torch.ones(2, 8)).sum().backward()
    return worst


@pytest.mark.dist
@pytest.mark.slow
def test_adapters_are_read_into_shards(three_ranks, tmp_path):
    assert three_ranks.run(adapter, str(tmp_path)) == [0.0] * 3
