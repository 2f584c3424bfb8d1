"""1F1B by lazy backward: a backward runs beside the next forward, once, and before anybody sees a gradient."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp
from examples.parallel.model import Layer, Llama, tensor_parallel
from mfsdp import pipeline
from mfsdp.runtime import overlap
from tests.helpers.experts import sharded
from tests.helpers.models import GPT, Block
from tests.helpers.parallel import next_token, reset, tokens, twin
from tests.helpers.parity import compiled

pytestmark = pytest.mark.dist


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]


def forget(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


class Counted:
    """How many backwards ran beside a forward."""

    def __init__(self) -> None:
        self.number, self._before = 0, overlap._beside

    def __enter__(self) -> Counted:
        def counted(*args: Any) -> Any:
            self.number += 1
            return self._before(*args)

        overlap._beside = counted
        return self

    def __exit__(self, *error: object) -> None:
        overlap._beside = self._before


def starved(layer: Any) -> None:
    """No token goes to the experts of the second rank."""
    layer.router.register_forward_hook(lambda module, args, out: out - 1e4 * (torch.arange(4) > 1))


def starved_again(layer: Any) -> None:
    """And the layer is computed again in backward, its exchanges too."""
    starved(layer)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def bitwise(
    lowering: str, layers: int, ways: tuple[bool, ...], changed: Callable[[Any], None] | None = None
) -> list[tuple[list[str], int, bool]]:
    """Of each way, three microbatches under `no_sync` or not: gradients that differ from those of plain accumulation,
    how many backwards waited, and whether losses are the same.
    """
    _, model = sharded(2, layers=layers)
    for layer in model.layers if changed else ():
        changed(layer)
    run, rank = compiled(model, lowering), dist.get_rank()
    batches = [tokens(100 * m + rank) for m in range(3)]

    def loop(kept: bool) -> list[torch.Tensor]:
        losses = []
        for i, batch in enumerate(batches):
            with mfsdp.no_sync(model) if kept and i < 2 else nullcontext():
                losses.append(next_token(run, batch))
                losses[-1].backward()
        return [loss.detach() for loss in losses]

    found = []
    for kept in ways:
        want = loop(kept)
        plain = gradients(model)
        forget(model)
        with Counted() as beside, mfsdp.overlapped(model):
            got = loop(kept)
        mine = gradients(model)
        forget(model)
        wrong = [n for n in plain if not torch.equal(plain[n], mine[n])]
        found.append((wrong, beside.number, all(map(torch.equal, want, got))))
    return found


@pytest.mark.parametrize(
    ("lowering", "layers"),
    [
        ("eager", 1),
        pytest.param("eager", 2, marks=pytest.mark.exhaustive),
        *(pytest.param(x, 1, marks=[pytest.mark.inductor, pytest.mark.exhaustive]) for x in ("stitched", "whole")),
    ],
)
def test_gradients_are_those_of_accumulation(two_ranks, lowering, layers):
    """Which reduces each microbatch, and which reduces once."""
    assert two_ranks.run(bitwise, lowering, layers, (False, True), timeout=500) == [[([], 2, True)] * 2] * 2


@pytest.mark.exhaustive
def test_checkpointed_layers_where_half_of_the_experts_get_nothing(four_ranks):
    """Over (efsdp 2, ep 2)."""
    assert four_ranks.run(bitwise, "eager", 1, (False,), starved_again, timeout=500) == [[([], 2, True)]] * 4


def looked_at() -> dict[str, Any]:
    """What several tests below ask of one compiled model; behind `seen_from`, which reads rows, no backward waits."""
    _, model = sharded(2, layers=1)
    run = compiled(model, "eager")
    out = {}
    for look in (profiled, wrong_in_the_gap, refused, stepped, seen_from):
        out[look.__name__] = look(model, run)
        forget(model)
    return out


@pytest.fixture(scope="module")
def looks(two_ranks) -> list[dict[str, Any]]:
    return two_ranks.run(looked_at, timeout=500)  # type: ignore[no-any-return]


def wrong_in_the_gap(model: Any, run: Any) -> list[str]:
    """What goes wrong with what people do between a backward and the next forward."""
    wrong: list[str] = []
    rank = dist.get_rank()
    batches = [tokens(100 * m + rank) for m in range(3)]
    params = list(model.parameters())

    def train(*which: int) -> None:
        for i in which:
            next_token(run, batches[i]).backward()

    def expect(name: str, which: tuple[int, ...], beside: int | None = None) -> None:
        mine = gradients(model)
        forget(model)
        train(*which)
        want = gradients(model)
        forget(model)
        wrong.extend([name] if any(not torch.equal(mine[n], want[n]) for n in mine) else [])
        wrong.extend([f"{name}: {counted.number} beside"] if beside not in (None, counted.number) else [])

    with Counted() as counted, mfsdp.overlapped(model):
        train(0)
        seen = params[0].grad.full_tensor().clone()
        train(1)
        wrong += ["seen later"] if torch.equal(params[0].grad.full_tensor(), seen) else []
    expect("looked at", (0, 1), 0)

    with mfsdp.overlapped(model):
        train(0)
        for buffer in {p._mfsdp_owner for p in params}:
            buffer.gradients.due = None  # the mutation: nobody is told that somebody looks
        wrong += ["gradients come without being asked for"] if any(p.grad is not None for p in params) else []
    expect("the last one", (0,))

    with mfsdp.overlapped(model):
        train(0)
        mfsdp.norms(model)
        model.zero_grad()
        wrong += ["zero_grad"] if any(p.grad is not None for p in params) else []
        train(1, 2)
    expect("zero_grad", (1, 2))

    with pytest.raises(ZeroDivisionError), mfsdp.overlapped(model):
        train(0, 1)
        waiting = model.norm.weight._mfsdp_owner.gradients.overlap._waiting
        copied = waiting.program.info.caller_inputs
        wrong += [] if len(copied) == 1 else [f"{len(copied)} arguments are copied"]
        _ = 1 / 0
    expect("an exception", (0, 1))

    with mfsdp.overlapped(model):
        train(0)
        other = copy.deepcopy(model.norm)
        wrong += ["deepcopy"] if params[0].grad is None or other.weight.grad is None else []
    expect("deepcopy", (0,))

    with mfsdp.overlapped(model):
        train(0)
        with torch.no_grad():
            run.eval()(batches[2][:, :-1])
        run.train()
        model.state_dict()
        train(1)
    expect("evaluation", (0, 1))

    with Counted() as counted, mfsdp.overlapped(model):
        batches[1] = batches[1][:, :6]
        train(0, 1, 2)
    expect("shapes", (0, 1, 2), 2)

    with mfsdp.overlapped(model):
        losses = [next_token(run, batches[i]) for i in (0, 1)]
        for loss in losses:
            loss.backward()
    expect("two forwards first", (0, 1))

    told: list[str] = []
    hooks = [p.register_post_accumulate_grad_hook(lambda p: told.append("")) for p in params[:1]]
    with Counted() as counted, mfsdp.overlapped(model):
        train(0, 1)
    for hook in hooks:
        hook.remove()
    wrong += [] if len(told) == 2 else [f"hooks called {len(told)} times"]
    expect("hooks", (0, 1), 0)

    with mfsdp.overlapped(model):
        with pytest.raises(ValueError, match="overlapped already"), mfsdp.overlapped(model):
            pass
        with pytest.raises(NotImplementedError, match="asks for the gradient of the sharded parameter"):
            torch.autograd.grad(next_token(run, batches[0]), [model.norm.weight], allow_unused=True)
        wrong += ["autograd.grad"] if any(p.grad is not None for p in params) else []
    return wrong


def test_in_the_gap(looks):
    assert [look["wrong_in_the_gap"] for look in looks] == [[], []]


def profiled(model: Any, run: Any) -> tuple[int, int]:
    """How many backwards ran beside a forward while a profile looked, and how many programs it saw."""
    rank = dist.get_rank()

    def train(number: int) -> None:
        for micro in range(number):
            next_token(run, tokens(100 * micro + rank)).backward()

    train(1)
    with Counted() as counted, mfsdp.overlapped(model):
        train(1)
        with mfsdp.profile(run, steps=1) as seen:
            train(2)
            seen.step()
    return counted.number, len({x.phase for x in seen.lines})


def test_profiles_see_programs_one_by_one(looks):
    assert [look["profiled"] for look in looks] == [(0, 2)] * 2


def refused(model: Any, run: Any) -> list[str]:
    """What is written to while a backward waits: every look raises, until the context is left."""
    rank = dist.get_rank()
    out = []
    try:
        with mfsdp.overlapped(model):
            next_token(run, tokens(rank)).backward()
            with torch.no_grad():
                model.norm.weight.mul_(2)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="have been written while Mixtral backward waits"):
                    _ = model.norm.weight.grad
            next_token(run, tokens(100 + rank)).backward()
    except RuntimeError as error:
        out.append(str(error))
    out.append(f"{model.norm.weight.grad}")
    next_token(run, tokens(rank)).backward()  # all are still there
    return out


def test_weights_that_a_backward_needs_must_not_be_written_to(looks):
    for told, left in (look["refused"] for look in looks):
        assert re.search("weights of .* have been written while Mixtral backward waits", told) and left == "None"


def seen_from(model: Any, run: Any) -> list[str]:
    """Wherever somebody looks from, and whatever he does to what is his, gradients are those of the plain loop."""
    wrong: list[str] = []
    rank = dist.get_rank()
    p = model.norm.weight

    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = next_token(run, ids)
        loss.backward()
        return loss

    def expect(name: str) -> None:
        mine = gradients(model)
        forget(model)
        train(tokens(rank))
        want = gradients(model)
        forget(model)
        wrong.extend([name] if any(not torch.equal(mine[n], want[n]) for n in mine) else [])

    with mfsdp.overlapped(model):
        train(tokens(rank))
        with torch.autocast("cpu", torch.bfloat16):
            _ = p.grad
    expect("autocast")
    with mfsdp.overlapped(model):
        train(tokens(rank))
        with torch.inference_mode():
            _ = p.grad
        train(tokens(50 + rank))
        forget(model)
        train(tokens(rank))
    expect("inference mode")
    for name in ("version", "past it"):
        ids = tokens(rank)
        with mfsdp.overlapped(model):
            train(ids)
            ids.zero_() if name == "version" else ids.numpy().fill(3)
        expect(f"inputs written, {name}")
    with mfsdp.overlapped(model):
        other = (nn.Linear(3, 1)(torch.ones(2, 3))).sum()
        train(tokens(rank))
        x = torch.ones(3, requires_grad=True)
        x.register_hook(lambda grad: (p.grad, None)[1])  # in the middle of another backward
        torch.autograd.grad((x * other).sum(), [x])
    expect("inside of another backward")
    with mfsdp.overlapped(model):
        train(tokens(rank))
        told: list[int] = []
        hook = p.register_hook(lambda grad: told.append(1))
    hook.remove()
    wrong += ["a hook saw what came before it"] if told else []
    expect("hook")
    with mfsdp.overlapped(model):
        train(tokens(rank))
        p.requires_grad_(False)
    p.requires_grad_(True)
    expect("frozen")
    with mfsdp.overlapped(model):
        train(tokens(rank))
        p.grad = torch.zeros_like(p)
    wrong += ["set"] if bool(p.grad.full_tensor().any()) else []
    forget(model)
    rows = p.to_local()
    before = rows.detach().clone()
    with mfsdp.overlapped(model):
        train(tokens(rank))
        rows.data.mul_(3)
    rows.data.copy_(before)
    expect("rows that are out")
    return wrong


def test_wherever_somebody_looks_from(looks):
    assert [look["seen_from"] for look in looks] == [[], []]


def stepped(model: Any, run: Any) -> dict[bool, list[str]]:
    """Parameters that differ after steps with clipping inside of the context, by whether the optimizer is flat."""
    return {wrapped: steps(model, run, wrapped) for wrapped in (False, True)}


def steps(model: Any, run: Any, wrapped: bool) -> list[str]:
    rank, runs = dist.get_rank(), []
    start = [p.detach().clone() for p in model.parameters()]
    for beside in (False, True):
        with torch.no_grad():
            for p, before in zip(model.parameters(), start, strict=True):
                p.copy_(before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = mfsdp.fully_shard_optimizer(optimizer) if wrapped else optimizer
        with Counted() as counted, mfsdp.overlapped(model) if beside else nullcontext():
            for step in range(3):
                for micro in range(2):
                    next_token(run, tokens(10 * step + 100 * micro + rank)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert counted.number == (3 if beside else 0)
        runs.append({n: p.full_tensor().detach().clone() for n, p in model.named_parameters()})
    return [n for n in runs[0] if not torch.equal(runs[0][n], runs[1][n])]


@pytest.mark.parametrize("wrapped", [False, True])
def test_steps_inside(looks, wrapped):
    assert [look["stepped"][wrapped] for look in looks] == [[], []]


def apart() -> str:
    """Only one rank overlaps."""
    _, model = sharded(2, layers=1)
    run, rank = compiled(model, "eager"), dist.get_rank()
    try:
        with mfsdp.overlapped(model) if rank == 0 else nullcontext():
            for micro in range(2):
                next_token(run, tokens(100 * micro + rank)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_one_rank_alone_is_told(two_fresh_ranks):
    for told in two_fresh_ranks.run(apart, timeout=300):
        assert "under mfsdp.overlapped" in told


def filled() -> list[str]:
    """Gradients that are others without `hide_collectives`."""
    found = []
    for passes in (pipeline.PIPELINE, tuple(row for row in pipeline.PIPELINE if row[0] != "hide_collectives")):
        _, model = sharded(2, layers=1)
        next_token(compiled(model, "eager", passes=passes), tokens(dist.get_rank())).backward()
        found.append(gradients(model))
    return [n for n in found[0] if not torch.equal(found[0][n], found[1][n])]


def test_what_fills_exchanges_changes_no_bit(two_ranks):
    assert two_ranks.run(filled, timeout=300) == [[], []]


def tensor_parallel_too() -> tuple[list[str], int]:
    """What tensor parallelism exchanges gives turns too, in checkpointed layers."""
    reset()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    _, model = twin(lambda: Llama(layers=1, checkpointed=True))
    tensor_parallel(model, mesh["tp"])
    mfsdp.fully_shard(model, mesh=mesh, units=[Layer])
    run = compiled(model, "eager")
    found = []
    with Counted() as counted:
        for beside in (False, True):
            with mfsdp.overlapped(model) if beside else nullcontext():
                for micro in range(3):
                    next_token(run, tokens(micro)).backward()
            found.append(gradients(model))
            forget(model)
    return [n for n in found[0] if not torch.equal(found[0][n], found[1][n])], counted.number


def test_tensor_parallel(two_ranks):
    assert two_ranks.run(tensor_parallel_too, timeout=300) == [([], 2)] * 2


def dense() -> list[str]:
    model = mfsdp.fully_shard(GPT(layers=1), units=[Block])
    run, told = compiled(model, "eager"), []
    before, overlap.log.info = overlap.log.info, lambda text, *words: told.append(text % words)
    try:
        with mfsdp.overlapped(model):
            for _ in range(2):
                run(torch.randint(31, (1, 4))).sum().backward()
    finally:
        overlap.log.info = before
    return [line for line in told if "overlapped" in line]


def test_dense_models_do_not_wait(two_ranks):
    for told in two_ranks.run(dense):
        assert len(told) == 1 and "no backward has waited: no compiled backward of GPT" in told[0]


class Scaled(nn.Module):
    """Backward reads buffers, of which forward itself may write one."""

    def __init__(self, writes: bool):
        super().__init__()
        self.up, self.writes = nn.Linear(8, 8), writes
        self.register_buffer("mine", torch.full((8,), 2.0))
        self.register_buffer("yours", torch.full((8,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x) * self.mine.clone() * self.yours
        if self.writes:
            with torch.no_grad():
                self.mine.mul_(0.5)
        return x + fc.all_to_all_single_autograd(y, None, None, dist.group.WORLD)  # type: ignore[no-any-return]


def written(lowering: str, ways: tuple[bool, ...] = (False, True)) -> list[tuple[bool, bool]]:
    """Whether forward writes buffers, and whether the loop does between microbatches, where gradients differ."""
    wrong = []
    for inside in ways:
        reset()
        torch.manual_seed(0)
        model = mfsdp.fully_shard(nn.Sequential(Scaled(inside), Scaled(inside)), units=[Scaled])
        run = compiled(model, lowering)
        for between in ways:
            found = []
            for beside in (False, True):
                for layer in model:
                    layer.mine.fill_(2.0)
                    layer.yours.fill_(3.0)
                torch.manual_seed(dist.get_rank())
                with mfsdp.overlapped(model) if beside else nullcontext():
                    for _ in range(3):
                        run(torch.randn(4, 8)).square().sum().backward()
                        if between:
                            model[0].yours.mul_(0.7)
                found.append(gradients(model))
                forget(model)
            if any(not torch.equal(found[0][n], found[1][n]) for n in found[0]):
                wrong.append((inside, between))
    return wrong


def test_buffers_may_be_written_to(two_ranks):
    assert two_ranks.run(written, "eager", timeout=300) == [[], []]


@pytest.mark.slow
@pytest.mark.inductor
def test_code_of_inductor_runs_beside_too(two_ranks):
    assert two_ranks.run(written, "stitched", (False,), timeout=300) == [[], []]


def test_what_is_not_sharded_or_not_one_model():
    with pytest.raises(ValueError, match="not sharded"), mfsdp.overlapped(nn.Linear(2, 2)):
        pass
    refused = pytest.raises(TypeError, match="not list: turns among stages of a virtual pipeline")
    with refused, mfsdp.overlapped([nn.Linear(2, 2)]):
        pass
