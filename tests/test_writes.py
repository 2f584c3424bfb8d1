"""What forward writes to a sharded parameter is refused by name, compiled and not; nothing is lost without a word."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import mfsdp
from tests.helpers.parity import averaged, error, whole


def _halve(m: Book) -> None:
    m.code.mul_(0.5)


def _add(m: Book) -> None:
    code = m.code
    code += 1


def _row(m: Book) -> None:
    m.code[0] = 3


def _view(m: Book) -> None:
    m.code.unsqueeze(0)[0].t()[1].zero_()


def _data(m: Book) -> None:
    m.code.data.mul_(0.5)


def _out(m: Book) -> None:
    torch.mul(m.code, 2, out=m.code)


def _foreach(m: Book) -> None:
    torch._foreach_mul_([m.code, m.stray], 2)


def _init(m: Book) -> None:
    nn.init.zeros_(m.code)


def _detach(m: Book) -> None:
    m.code.detach().clamp_(-0.1, 0.1)


def _renormalise(m: Book) -> None:
    F.embedding(torch.tensor([0, 1]), m.code, max_norm=0.1)


def _chunk(m: Book) -> None:
    m.code.chunk(2)[1].copy_(torch.zeros(2, 4))


WRITES: list[Callable[[Any], None]] = [
    _halve, _add, _row, _view, _data, _out, _foreach, _init, _detach, _renormalise, _chunk,
]  # fmt: skip


class Book(nn.Module):
    """A codebook that forward writes to."""

    def __init__(self, write: Callable[[Any], None], frozen: bool = True, recompute: bool = False):
        super().__init__()
        self.write, self.recompute = write, recompute
        self.inner = nn.Linear(4, 4)
        self.code = nn.Parameter(torch.ones(4, 4), requires_grad=not frozen)
        self.register_buffer("stray", torch.ones(3))

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self)
        return self.inner(x) @ self.code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.quantise, x, use_reentrant=False) if self.recompute else self.quantise(x)


def _compiled(model: nn.Module, how: str) -> nn.Module:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    return torch.compile(model, backend="mfsdp", options={"lowering": "eager"}) if how == "compiled" else model


@pytest.mark.parametrize("how", ["compiled", "plain"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__.strip("_"))
def test_a_write_is_refused_by_name(write, how):
    model = mfsdp.fully_shard(Book(write))
    where = r"writes to the parameter code of unit '\(root\)' \(.*test_writes.py:\d+"
    with pytest.raises(RuntimeError, match=where) as e:
        _compiled(model, how)(torch.randn(2, 4))
    assert "register_buffer" in str(e.value) and "ignored_params" in str(e.value)


@pytest.mark.parametrize("how", ["compiled", "plain"])
def test_what_only_looks_like_a_write(how):
    def look(m: Book) -> None:
        m.code.requires_grad_(m.code.requires_grad)
        copy = m.code.clone()
        copy += m.code.detach_()
        torch._foreach_add_([copy], [m.code])
        m.stray.copy_(m.code[0, :3])

    _compiled(mfsdp.fully_shard(Book(look)), how)(torch.randn(2, 4))


@pytest.mark.parametrize("how", ["compiled", "plain"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_whatever_trains_or_is_checkpointed(how, frozen, grad, recompute):
    model = nn.Sequential(nn.Linear(4, 4), Book(_halve, frozen, recompute))
    mfsdp.fully_shard(model, units=[Book])
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="parameter code of unit '1'"):
        _compiled(model, how)(torch.randn(2, 4))


def test_the_line_is_that_of_the_write():
    model = mfsdp.fully_shard(Book(_add))
    with pytest.raises(RuntimeError, match=rf"test_writes.py:{_add.__code__.co_firstlineno + 2}\)"):
        _compiled(model, "compiled")(torch.randn(2, 4))


def test_a_data_assignment_is_refused():
    def assign(m: Book) -> None:
        m.code.data = torch.zeros(4, 4)

    model = mfsdp.fully_shard(Book(assign))
    for run in (model, _compiled(model, "compiled")):
        with pytest.raises(RuntimeError, match="writes to the parameter code"):
            run(torch.randn(2, 4))


def test_inference_mode():
    model = mfsdp.fully_shard(Book(_halve))
    for run in (model, _compiled(model, "compiled")):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="writes to the parameter code"):
            run(torch.randn(2, 4))


def test_explain_refuses_what_a_run_refuses():
    with pytest.raises(RuntimeError, match="writes to the parameter code"):
        mfsdp.explain(Book(_halve), (torch.randn(2, 4),))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_when_the_model_is_sharded(kind):
    model = nn.Sequential(kind(9, 4, max_norm=0.5))
    with pytest.raises(ValueError, match=rf"{kind.__name__}\(max_norm=0.5\) writes to its parameter 0.weight"):
        mfsdp.fully_shard(model)
    assert type(model) is nn.Sequential and type(model[0].weight) is nn.Parameter
    mfsdp.fully_shard(model, ignored_params=[model[0].weight])


def test_an_exception_of_forward_comes_first():
    def broken(m: Book) -> None:
        m.code.mul_(2)
        raise KeyError("mine")

    model = mfsdp.fully_shard(Book(broken))
    with pytest.raises(KeyError, match="mine"):
        _compiled(model, "plain")(torch.randn(2, 4))
    model.write = lambda m: None
    assert _compiled(model, "plain")(torch.randn(2, 4)).shape == (2, 4)


def test_what_is_unsharded_by_hand_is_watched_too():
    model = mfsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), units=["0"])
    with pytest.raises(RuntimeError, match="parameter weight of unit '0'"), mfsdp.unsharded(model), torch.no_grad():
        model[0].weight.mul_(2)
    assert not any(m._mfsdp_unit.kept or m._mfsdp_unit.open for m in (model, model[0]))
    model.unshard()
    with torch.no_grad():
        model.bias = None
        model[1].weight.zero_()
    with pytest.raises(RuntimeError, match="between unshard"):
        model.reshard()


class Buffers(nn.Module):
    """Writes to buffers, in forward: those are nobody's but this rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6)
        self.weighted = parametrizations.weight_norm(nn.Linear(6, 6))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        x = F.relu(self.norm(self.linear(x)), inplace=True)
        weight = self.weighted.weight.clone()
        with torch.no_grad():
            weight[0] += 1
        return F.linear(x, weight, self.weighted.bias).add_(1)


def buffers(how: str) -> float:
    torch.manual_seed(0)
    reference = Buffers()
    model = mfsdp.fully_shard(copy.deepcopy(reference))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    run = _compiled(model, how)
    for m in (run, reference):
        m(x).square().mean().backward()
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert all(torch.allclose(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))
    return max(error(whole(p.grad), q.grad, 1e-3) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("how", ["compiled", "plain"])
def test_buffers_may_be_written(two_ranks, how):
    assert max(two_ranks.run(buffers, how)) < 1e-5


def on_ranks(how: str, strategy: int) -> list[str]:
    said = []
    for write in (_halve, _data, _foreach):
        model = mfsdp.fully_shard(nn.Sequential(Book(write)), units=[Book], strategy=strategy)
        try:
            _compiled(model, how)(torch.randn(2, 4))
        except RuntimeError as e:
            said.append(str(e))
        if strategy or how == "compiled":  # else forward reads the main weights themselves
            assert torch.equal(model[0].code.full_tensor(), torch.ones(4, 4))
        model[0].write = lambda m: None
        torch._dynamo.reset()
        model[0].inner.weight.data.mul_(1)
        assert error(_compiled(model, how)(torch.ones(2, 4)), model(torch.ones(2, 4))) < 1e-6
    return said


@pytest.mark.dist
@pytest.mark.parametrize("how", ["compiled", "plain"])
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_ranks(two_ranks, how, strategy):
    for said in two_ranks.run(on_ranks, how, strategy):
        assert len(said) == 3 and all("parameter code of unit '0'" in text for text in said), said


def test_writes_outside_of_forward_stay():
    model = mfsdp.fully_shard(nn.Linear(4, 4))
    run = _compiled(model, "compiled")
    for _ in range(2):
        run(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)
            model.bias.data.zero_()
    assert model.weight.full_tensor().abs().max() <= 0.1 and not model.bias.full_tensor().any()
    warnings.simplefilter("ignore")
    assert error(model(torch.ones(1, 4)), run(torch.ones(1, 4))) < 1e-6
