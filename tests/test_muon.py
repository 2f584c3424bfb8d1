"""Muon on shards: weights and momentum bitwise those of `torch.optim.Muon` on one process, for equal gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mfsdp
from mfsdp.config.hardware import KNOWN
from mfsdp.cost_model import whole_matrices
from mfsdp.optim.flat_optimizer import fully_shard_optimizer
from mfsdp.optim.matrix_step import _Doing
from mfsdp.planning.explain import buffers_of
from mfsdp.runtime import step_prefetch
from mfsdp.runtime.execution import Execution
from mfsdp.runtime.groups import fake_ranks
from tests.helpers.models import GPT
from tests.helpers.models import Block as GPTBlock
from tests.helpers.parity import compiled, whole


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.a = nn.Linear(24, 37 + number)
        self.b = nn.Linear(37 + number, 24)
        self.norm = nn.LayerNorm(24)
        self.tiny = nn.Linear(24, 1, bias=False)
        self.two = nn.Linear(7, 2, bias=False)
        self.qkv = nn.Linear(24, 72)
        self.experts = nn.Parameter(torch.randn(3, 10, 16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(Block(i % 2) for i in range(3))
        self.head = nn.Linear(24, 50, bias=False)


def groups_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter], Any]:
    """Matrices, fused matrices, stacked matrices, and the rest."""
    named = dict(model.named_parameters())
    fused = [p for n, p in named.items() if "qkv.weight" in n]
    stacked = [p for n, p in named.items() if "experts" in n]
    taken = {id(p) for p in (*fused, *stacked)}
    matrices = [
        p for n, p in named.items() if p.dim() == 2 and "emb" not in n and "head" not in n and id(p) not in taken
    ]
    taken |= {id(p) for p in matrices}
    return matrices, fused, stacked, [p for p in named.values() if id(p) not in taken]


def muon(model: nn.Module, **settings: Any) -> torch.optim.Muon:
    matrices, fused, stacked, _ = groups_of(model)
    optimizer = torch.optim.Muon([{"params": matrices}, {"params": fused, "split_sizes": [24, 24, 24]}], **settings)
    optimizer.add_param_group({"params": stacked, "lr": 0.05})
    return optimizer


class Reference:
    """The same on one process: `torch.optim.Muon` on parameters that are cut up by hand."""

    def __init__(self, model: nn.Module, **settings: Any):
        matrices, fused, stacked, _ = groups_of(model)
        self.parts = [(p, [p.detach().clone()]) for p in matrices]
        self.parts += [(p, [x.clone() for x in p.detach().split(24)]) for p in fused]
        self.parts += [(p, [x.clone() for x in p.detach()]) for p in stacked]
        late = [nn.Parameter(x) for p, each in self.parts[-len(stacked) :] for x in each]
        early = [nn.Parameter(x) for p, each in self.parts[: -len(stacked)] for x in each]
        self.params = [*early, *late]
        self.optimizer = torch.optim.Muon([{"params": early}, {"params": late, "lr": 0.05}], **settings)

    def step(self, grads: dict[nn.Parameter, torch.Tensor]) -> None:
        found = iter(self.params)
        for p, each in self.parts:
            grad = grads[p]
            parts = [grad] if len(each) == 1 else list(grad.split(24) if grad.dim() == 2 else grad)
            for part in parts:
                next(found).grad = part.clone()
        self.optimizer.step()

    def values(self) -> Iterator[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
        found = iter(self.params)
        for p, each in self.parts:
            mine = [next(found) for _ in each]
            momenta = [self.optimizer.state[x]["momentum_buffer"] for x in mine]
            join = (lambda xs: xs[0]) if len(each) == 1 else torch.cat if p.dim() == 2 else torch.stack
            yield p, join([x.detach() for x in mine]), join(momenta)


def give(p: Any, grad: torch.Tensor) -> None:
    at = p.sharding.local()
    part = grad.reshape(-1)[at.param_offset : at.param_offset + at.numel].view(at.shape)
    p.grad = type(p)._alike(part, p.sharding, False)


def alike(optimizing: dict[str, Any], settings: dict[str, Any], sharding: dict[str, Any], steps: int = 3) -> str:
    """What is not bitwise the same, and the step as text."""
    torch.manual_seed(0)
    one = Model()
    model = mfsdp.fully_shard(copy.deepcopy(one), units=[Block], **sharding)
    reference, optimizer = (
        Reference(one, lr=0.02, **settings),
        fully_shard_optimizer(muon(model, lr=0.02, **settings), **optimizing),
    )
    pairs = dict(zip(one.parameters(), model.parameters(), strict=True))
    for step in range(steps):
        torch.manual_seed(100 + step)
        grads = {p: torch.randn(p.shape) for p in one.parameters()}
        for p, grad in grads.items():
            give(pairs[p], grad)
        reference.step(grads)
        optimizer.step()
        optimizer.zero_grad()
    names = {p: n for n, p in one.named_parameters()}
    wrong = []
    for p, weights, momentum in reference.values():
        mine = pairs[p]
        if not torch.equal(whole(mine), weights):
            wrong.append(f"{names[p]} by {(whole(mine) - weights).abs().max()}")
        if not torch.equal(whole(optimizer.state[mine]["momentum_buffer"]), momentum):
            wrong.append(f"momentum of {names[p]}")
    return "; ".join(wrong) or optimizer.describe().splitlines()[0]


def every_way() -> dict[str, str]:
    world = dist.get_world_size()
    found = {
        "plain": alike({}, {}, {}),
        "one unit per wave": alike({"max_staging": 1}, {}, {}),
        "no nesterov": alike({}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}, {}),
        "host": alike({"offload": "state"}, {}, {}),
        **{f"strategy {s}": alike({}, {}, {"strategy": s}) for s in (0, 1, 2)},
    }
    if world == 4:
        for name, more in {
            "hsdp": {}, "hfsdp": {"outer_strategy": "optim"}, "hfsdp 1": {"outer_strategy": "optim", "strategy": 1},
        }.items():  # fmt: skip
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
            found[name] = alike({}, {}, {"mesh": mesh, **more})
    return found


def checked(answers: list[dict[str, str]]) -> None:
    for found in answers:
        assert all(text.startswith("; Muon: 30 matrices") for text in found.values()), found


@pytest.mark.dist
def test_bitwise_on_two_ranks(two_ranks):
    checked(two_ranks.run(every_way))


@pytest.mark.dist
def test_bitwise_on_three_ranks(three_ranks):
    checked(three_ranks.run(every_way))


@pytest.mark.dist
def test_bitwise_on_four_ranks(four_ranks):
    checked(four_ranks.run(every_way))


def test_bitwise_on_one_rank():
    assert alike({}, {}, {}).startswith("; Muon: 30 matrices")


# What travels


def counted() -> tuple[list[int], list[int], int]:
    """Bytes that this rank sends in a step, as every rank's plan has them, and elements of all matrices."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Model(), units=[Block])
    optimizer: Any = fully_shard_optimizer(muon(model, lr=0.02), max_staging=1)
    sent, own, me = [], Execution.all_to_all, dist.get_rank()

    def counting(self: Any, out: Any, given: Any, received: Any, splits: Any, group: str) -> Any:
        assert given.dtype is torch.bfloat16
        sent.append(given.itemsize * (sum(splits) - splits[me]))
        return own(self, out, given, received, splits, group)

    for p in model.parameters():
        give(p, torch.randn(p.shape))
    Execution.all_to_all = counting  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        Execution.all_to_all = own  # type: ignore[method-assign]
    step = optimizer._mfsdp_runs.matrices.plan
    (planned,) = [step.sent(ring) for ring in step.loads]
    assert len(sent) == 2 * len(step.waves) == 6, "one exchange there and one back per wave"
    return sent, planned, sum(m.numel for wave in step.waves for m in wave.matrices)


@pytest.mark.dist
def test_bytes_are_those_of_the_plan(four_ranks):
    answers = four_ranks.run(counted)
    for rank, (sent, planned, _) in enumerate(answers):
        assert sum(sent) == planned[rank]
    numel = answers[0][2]
    assert sum(planned) / 4 <= 4 * numel / 4 * 3 / 4


# Tensor parallelism


def pieces(shape: tuple[int, int], **sharding: Any) -> str:
    """What is not bitwise the same where tensor parallelism has cut matrices by rows, by columns, and fused ones."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    layers = [nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 10), nn.Linear(8, 24)]
    one = nn.Sequential(*layers)
    model = copy.deepcopy(one)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "3": ColwiseParallel()})
    mfsdp.fully_shard(model, mesh=mesh["dp_shard"], **sharding)
    mine, theirs = ([m.get_parameter(f"{i}.weight") for i in range(4)] for m in (model, one))
    optimizer: Any = fully_shard_optimizer(
        torch.optim.Muon([{"params": mine[:3]}, {"params": mine[3:], "split_sizes": [10, 7, 7]}], lr=0.1)
    )
    parts = [nn.Parameter(x.clone()) for x in theirs[3].detach().split([10, 7, 7])]
    reference = torch.optim.Muon([*theirs[:3], *parts], lr=0.1)
    for _ in range(3):
        for p, q in zip(mine, theirs, strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = torch.zeros_like(p)
            p.grad.copy_(q.grad)
        for part, grad in zip(parts, theirs[3].grad.split([10, 7, 7]), strict=True):
            part.grad = grad
        optimizer.step()
        reference.step()
    want = [*theirs[:3], torch.cat(parts)]
    return str([i for i, (p, q) in enumerate(zip(mine, want, strict=True)) if not torch.equal(p.full_tensor(), q)])


def refused_pieces() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Sequential(nn.Linear(8, 13, bias=False), nn.Linear(13, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    mfsdp.fully_shard(model, mesh=mesh["dp_shard"])
    said = ""
    try:
        fully_shard_optimizer(torch.optim.Muon(model.parameters()))
    except NotImplementedError as error:
        said = str(error)
    optimizer: Any = torch.optim.Muon([{"params": list(model.parameters()), "blockwise": True}], lr=0.1)
    fully_shard_optimizer(optimizer)
    one = [nn.Parameter(p.to_local().detach().clone()) for p in model.parameters()]
    for p, q in zip(model.parameters(), one, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer.step()
    torch.optim.Muon(one, lr=0.1).step()
    same = all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), one, strict=True))
    return [said, f"as matrices of their own: {same}"]


@pytest.mark.dist
def test_matrices_that_tensor_parallelism_has_cut(four_ranks, two_ranks):
    for shape, sharding in (((2, 2), {}), ((1, 4), {}), ((2, 2), {"strategy": 0}), ((2, 2), {"strategy": 1})):
        assert set(four_ranks.run(pieces, shape, **sharding)) == {"[]"}, (shape, sharding)
    for said, same in two_ranks.run(refused_pieces):
        assert "pieces of different sizes" in said and "'blockwise': True" in said
        assert same.endswith("True")


# Training


def optimizers(model: nn.Module, flat: bool) -> list[Any]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    found: list[Any] = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    return [fully_shard_optimizer(o) for o in found] if flat else found


def trains(folder: str, first: int, last: int) -> tuple[float, int]:
    """The largest error of weights over some steps with clipping, schedulers and gathers ahead, against one process;
    goes on from a checkpoint of the steps before, and leaves one.
    """
    torch.manual_seed(0)
    reference = GPT(tied=False)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[GPTBlock])
    run, mine, theirs = compiled(model, "eager"), optimizers(model, True), optimizers(reference, False)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n) for o in (*mine, *theirs)]
    checkpoints = mfsdp.Checkpoints(folder)
    assert checkpoints.load(model, mine) == (first or None)
    worst, world = 0.0, dist.get_world_size()
    for step in range(last):
        torch.manual_seed(step)
        batch = torch.randint(31, (12, 8))
        for m, os, x in ((reference, theirs, batch), (run, mine, batch.chunk(world)[dist.get_rank()])):
            if m is run and step < first:
                continue
            m(x).float().square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            for o in os:
                o.step()
                o.zero_grad()
        for s in schedulers:
            s.step()
        if step >= first:
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            worst = max(worst, *((whole(p) - q).abs().max().item() for p, q in pairs))
    if not first:
        checkpoints.save(last, model, iter(mine))
    return worst, model._mfsdp_unit.outermost.ahead.wasted


@pytest.mark.dist
def test_trains_saves_on_two_ranks_and_goes_on_on_three(two_ranks, three_ranks, tmp_path):
    """bfloat16 rounds gradients that were summed in another order to another neighbour: a few 1e-5."""
    for worst, wasted in two_ranks.run(trains, str(tmp_path), 0, 2):
        assert worst < 1e-4 and not wasted
    for worst, _ in three_ranks.run(trains, str(tmp_path), 2, 4):
        assert worst < 1e-4


@pytest.mark.slow
def test_a_checkpoint_of_one_that_has_stepped_and_one_that_has_not(tmp_path):
    """Saving is no step of either: training goes on with the bits of a run that was not saved."""

    def step(model: nn.Module, some: list[Any]) -> None:
        model(torch.arange(24).view(3, 8)).float().square().mean().backward()
        for o in some:
            o.step()
        model.zero_grad()

    torch.manual_seed(0)
    first, other = (mfsdp.fully_shard(GPT(tied=False), units=[GPTBlock]) for _ in range(2))
    checkpoints = mfsdp.Checkpoints(tmp_path)
    for number, stepped in enumerate((0, 1)):  # Muon has, then AdamW
        a, b, c = (copy.deepcopy(m) for m in (first, first, other))
        mine, saved, fresh = (optimizers(m, True) for m in (a, b, c))
        step(a, mine[stepped : stepped + 1])
        step(b, saved[stepped : stepped + 1])
        checkpoints.save(number, b, saved)
        assert saved[stepped].state and not saved[1 - stepped].state
        with pytest.raises(mfsdp.CheckpointError, match=r"param_groups.0.betas"):
            checkpoints.load(c, fresh[::-1])
        assert checkpoints.load(c, fresh) == number
        for m, os in ((a, mine), (b, saved), (c, fresh)):
            step(m, os)
        for p, q, r in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
            assert torch.equal(whole(p), whole(q)) and torch.equal(whole(p), whole(r))


def test_what_checkpoints_take_as_optimizers(tmp_path):
    model = mfsdp.fully_shard(GPT(tied=False), units=[GPTBlock])
    (muon, adamw), checkpoints = optimizers(model, True), mfsdp.Checkpoints(tmp_path)
    for wrong in ([muon, "adamw"], torch.optim.lr_scheduler.ConstantLR(adamw)):
        with pytest.raises(TypeError, match="is no torch.optim.Optimizer; give one, or a list"):
            checkpoints.save(1, model, wrong)
    twice = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Muon and SGD hold the same parameter, of shape \["):
        checkpoints.save(1, model, [muon, twice])
    assert not checkpoints.steps()


class Layers(nn.Module):
    """Units of one matrix each; a rank may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x if skip and i == 1 else layer(x).tanh()
        return x


def ahead_and_unused(unused: bool) -> tuple[list[bool], int]:
    """Steps against `torch.optim.Muon` on the full gradients, and how many gathers they launched ahead."""
    torch.manual_seed(0)
    model = Layers()
    for layer in model.layers if unused else ():
        mfsdp.fully_shard(layer, may_be_unused=True)
    mfsdp.fully_shard(model, units=None if unused else ["layers.*"])
    run = compiled(model, "eager")
    one = [nn.Parameter(whole(p).detach().clone()) for p in model.parameters()]
    optimizer: Any = fully_shard_optimizer(torch.optim.Muon(model.parameters(), lr=0.1), max_staging=1)
    reference, launched, same = torch.optim.Muon(one, lr=0.1), [], []
    own: Any = step_prefetch._launched

    def counting(*args: Any) -> Any:
        launched.append(1)
        return own(*args)

    step_prefetch._launched = counting
    try:
        for step in range(4):
            torch.manual_seed(10 * step + dist.get_rank())
            run(torch.randn(3, 9), unused and bool(dist.get_rank())).square().sum().backward()
            for p, q in zip(model.parameters(), one, strict=True):
                q.grad = whole(p.grad).clone()
            optimizer.step()
            reference.step()
            model.zero_grad()
            same.append(all(torch.equal(whole(p), q) for p, q in zip(model.parameters(), one, strict=True)))
    finally:
        step_prefetch._launched = own
    mfsdp.synchronize(model)
    return same, len(launched)


@pytest.mark.dist
def test_gathers_ahead_and_units_that_a_rank_leaves_out(two_ranks):
    for same, launched in two_ranks.run(ahead_and_unused, False):
        assert same == [True] * 4 and launched > 0
    for same, _ in two_ranks.run(ahead_and_unused, True):
        assert same == [True] * 4


def against_the_prediction() -> tuple[str, str, int, int]:
    """The listing of a real step and of `explain`, and bytes of state on this rank and in the ledger."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(GPT(tied=False, layers=4), units=[GPTBlock])
    mine = optimizers(model, True)
    for p in model.parameters():
        give(p, torch.randn(p.shape))
    for o in mine:
        o.step()
    states = [x.to_local() for o in mine for s in o.state.values() for x in s.values() if x.dim()]
    ids = torch.zeros(1, 8, dtype=torch.int64)
    report = mfsdp.explain(
        GPT(tied=False, layers=4), (ids,), world=2, units=[GPTBlock], optimizer="muon", suggest=False
    )
    entry = next(e.nbytes for e in report.ledger.entries if e.name == "optimizer state")
    assert report.matrices[0] in report.summary() and report.matrices[1] in str(report)
    return mine[0].describe(), report.matrices[1], sum(x.nbytes for x in states), entry


@pytest.mark.dist
def test_explain_knows_owners_and_state(two_ranks):
    for real, predicted, states, entry in two_ranks.run(against_the_prediction):
        assert real == predicted
        assert states <= entry <= 1.1 * states, "the ledger counts padding too"


@pytest.mark.slow
def test_time_grows_with_the_matrices_and_shrinks_with_ranks():
    h100 = KNOWN["h100"]

    def seconds(world: int, width: int) -> float:
        with fake_ranks(world):
            model = mfsdp.fully_shard(GPT(width=width, tied=False, layers=4), units=[GPTBlock])
            return whole_matrices.seconds(buffers_of(model), h100)

    wide, narrow = seconds(1, 256), seconds(1, 128)
    assert wide == pytest.approx(8 * narrow), "no exchange, cubic"
    assert seconds(1, 512) / 4 < seconds(4, 512) < seconds(1, 512), "exchanges are added"
    model, ids = GPT(tied=False), torch.zeros(1, 8, dtype=torch.int64)
    there, away = (
        mfsdp.explain(model, (ids,), world=4, units=[GPTBlock], optimizer="muon", suggest=False, stepping=stepping)
        for stepping in ("flat", "offloaded")
    )
    assert away.ledger.host > 0 and away.optimizer > there.optimizer


# Faults


def interrupted(rank: int | None) -> str:
    """A step that raises in the second wave, on one rank or on all, and what the next steps say."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Model(), units=[Block])
    optimizer: Any = fully_shard_optimizer(muon(model, lr=0.02), max_staging=1)
    own, said = _Doing._compute, ""

    def full(self: Any, k: int, wave: Any) -> None:
        if k == 1 and rank in (None, dist.get_rank()):
            raise MemoryError("full")
        own(self, k, wave)

    def step() -> None:
        for p in model.parameters():
            give(p, torch.randn(p.shape))
        optimizer.step()

    _Doing._compute = full  # type: ignore[method-assign]
    try:
        step()
    except (MemoryError, RuntimeError) as error:
        said = f"{error} {error.__notes__}; "
    finally:
        _Doing._compute = own  # type: ignore[method-assign]
    try:
        step()
        step()
    except RuntimeError as error:
        return f"{said}{error}"
    return f"{said}no error"


@pytest.mark.dist
def test_an_exception_on_all_ranks_can_be_caught(two_ranks):
    for said in two_ranks.run(interrupted, None, timeout=60):
        assert said.endswith("no error") and "state may be new where weights are old" in said
        assert "of step of Muon, or after it" in said


@pytest.mark.dist
def test_an_exception_on_one_rank_ends_all(two_fresh_ranks):
    answers = two_fresh_ranks.run(interrupted, 1, timeout=60)
    assert all("invariant 50" in said or "lost the other ranks" in said for said in answers), answers


def interrupted_behind_launches() -> tuple[int, list[float]]:
    """A step that raises on all ranks when it has launched gathers ahead, and steps after it, with equal weights."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Layers(), units=["layers.*"])
    run = compiled(model, "eager")
    optimizer: Any = fully_shard_optimizer(torch.optim.Muon(model.parameters(), lr=0.1), max_staging=1)
    own, launched, ahead = _Doing._add, 0, model._mfsdp_unit.outermost.ahead

    def full(self: Any, k: int, wave: Any) -> None:
        nonlocal launched
        own(self, k, wave)
        if k == 2:
            launched = 0 if ahead.in_flight is None else len([e for e in ahead.in_flight.launched if e is not None])
            raise MemoryError("full")

    def step() -> None:
        run(torch.randn(3, 9), False).square().sum().backward()
        optimizer.step()
        model.zero_grad()

    step(), step()
    _Doing._add = full  # type: ignore[method-assign]
    try:
        with pytest.raises(MemoryError):
            step()
    finally:
        _Doing._add = own  # type: ignore[method-assign]
    model.zero_grad()
    step(), step()
    mfsdp.synchronize(model)
    sums = [whole(p).sum() for p in model.parameters()]
    return launched, [float(x) for x in sums]


@pytest.mark.dist
def test_an_exception_behind_gathers_ahead(two_ranks):
    answers = two_ranks.run(interrupted_behind_launches, timeout=60)
    assert answers[0] == answers[1] and answers[0][0] > 0


def differing() -> str:
    """One rank has no gradient of a matrix."""
    torch.manual_seed(0)
    model = mfsdp.fully_shard(Model(), units=[Block])
    optimizer = fully_shard_optimizer(muon(model, lr=0.02))
    for n, p in model.named_parameters():
        if not (n == "layers.1.a.weight" and dist.get_rank()):
            give(p, torch.randn(p.shape))
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_ranks_that_would_exchange_something_else_raise(two_fresh_ranks):
    for said in two_fresh_ranks.run(differing, timeout=60):
        assert "step of Muon" in said and "a.weight [38, 24] to" in said and "invariant 13" in said, said


def test_what_cannot_be_stepped_is_refused():
    model = mfsdp.fully_shard(Model())
    named = dict(model.named_parameters())

    def said(kind: type[Exception], optimizer: torch.optim.Optimizer, **options: Any) -> str:
        own = type(optimizer)
        with pytest.raises(kind) as error:
            fully_shard_optimizer(optimizer, **options)
        assert type(optimizer) is own
        return str(error.value)

    def of(names: list[str], **more: Any) -> torch.optim.Muon:
        return torch.optim.Muon([{"params": [named[n] for n in names], **more}])

    mixed = of(["layers.0.a.weight"])
    mixed.add_param_group({"params": [named["layers.0.norm.weight"]]})
    assert "layers.0.norm.weight is [24]. Give it to another optimizer" in said(ValueError, mixed)
    assert "split_sizes=[3, 4] does not divide" in said(ValueError, of(["layers.0.a.weight"], split_sizes=[3, 4]))
    for wrong in (0, -1, True, 1.5, "1GiB"):
        assert "give a positive number of bytes" in said(ValueError, of(["head.weight"]), max_staging=wrong)
    assert "Leave it out" in said(ValueError, torch.optim.SGD(model.parameters()), max_staging=1)
    assert "Leave out compile" in said(NotImplementedError, of(["head.weight"]), compile=True)
    plain = of(["head.weight"])
    plain.add_param_group({"params": [nn.Parameter(torch.randn(4, 4))], "split_sizes": [2, 2]})
    assert "an unsharded parameter of [4, 4] steps as torch's Muon" in said(ValueError, plain)

    class SOAP(torch.optim.AdamW):
        pass

    class Muon(torch.optim.AdamW):
        pass

    assert "keeps matrices of state per parameter" in said(NotImplementedError, SOAP(model.parameters()))
    assert "only that of torch.optim.Muon itself" in said(NotImplementedError, Muon(model.parameters()))


def test_bfloat16_momentum_is_not_overwritten():
    """Which torch's own step does, with ``nesterov=False``."""
    weight = torch.randn(6, 4, dtype=torch.bfloat16)
    model = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    policy = mfsdp.MixedPrecisionPolicy(main_params_dtype=None)
    mfsdp.fully_shard(model, mp_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.Muon(model.parameters(), nesterov=False))
    give(next(model.parameters()), weight)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert torch.equal(whole(state["momentum_buffer"]), torch.zeros_like(weight).lerp_(weight, 1 - 0.95))


def test_keys_survive_a_state_dict_without_them():
    model = mfsdp.fully_shard(nn.Linear(4, 9, bias=False))
    plain = torch.optim.Muon(model.parameters())
    optimizer = fully_shard_optimizer(torch.optim.Muon([{"params": list(model.parameters()), "split_sizes": [3, 6]}]))
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["split_sizes"] == [3, 6]
    twin_model, twin = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (twin_model, twin)):
        give(next(m.parameters()), torch.ones(9, 4))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.step(o)
        assert "2 matrices" in o.describe()
    assert torch.equal(whole(next(model.parameters())), whole(next(twin_model.parameters())))
