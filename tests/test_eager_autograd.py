"""Sharded parameters in computations outside of forward, such as penalties: gradients equal the unsharded ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp.dtensor.eager_autograd import Way, way_of
from tests.helpers.models import GPT, MLP, Block
from tests.helpers.parity import averaged, error, whole

pytestmark = pytest.mark.dist


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


PENALTIES: dict[str, Any] = {
    "square": lambda m: sum(p.square().sum() for p in m.parameters()),
    "norm": lambda m: sum(p.norm() for p in m.parameters()),
    "norm 1": lambda m: sum(torch.linalg.vector_norm(p, 1) for p in m.parameters()),
    "foreach norm": lambda m: torch.stack(torch._foreach_norm(list(m.parameters()))).square().sum(),
    "abs": lambda m: sum(p.abs().sum() for p in m.parameters()),
    "mean of exp": lambda m: sum(p.exp().mean() for p in m.parameters()),
    "largest": lambda m: sum(p.abs().max() for p in m.parameters()),
    "distance": lambda m: sum(((p - 0.5 * p.detach().clone()) ** 2).sum() for p in m.parameters()),
    "distance to whole": lambda m: sum(
        ((p - torch.linspace(0, 1, p.numel()).view(p.shape)) ** 2).sum() for p in m.parameters()
    ),
    "full_tensor": lambda m: sum(whole(p).square().sum() if hasattr(p, "full_tensor") else p.square().sum()
                                 for p in m.parameters()),
    "numbers": lambda m: sum((1.5 * p + 0.25).pow(2).sum() for p in m.parameters()),
    "tensor weight": lambda m: sum((p * torch.tensor(1.0 + dist.get_rank())).sum() for p in m.parameters()),
    "mask": lambda m: sum((p * ((torch.arange(p.numel()) + dist.get_rank()) % 2).view(p.shape)).sum()
                          for p in m.parameters()),
    "rows": lambda m: sum(p.flatten(1).norm(dim=1).sum() for p in m.parameters() if p.dim() > 1),
    "product": lambda m: F.linear(torch.full((3, m.up.weight.shape[1]), 0.1 * (1 + dist.get_rank())), m.up.weight,
                                  m.up.bias).square().mean(),
    "orthogonal": lambda m: (m.up.weight.T @ m.up.weight - torch.eye(m.up.weight.shape[1])).square().sum(),
    "broadcast": lambda m: (m.scale.exp() * torch.full((2, 1), 1.0 + dist.get_rank())).tanh().sum(),
    "element": lambda m: m.up.weight[3, 5] * m.up.bias[-1] + m.scale[0].exp(),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()).square().sum(),
    "two parameters": lambda m: (m.up.weight * m.down.weight.T).sum() + (m.up.bias[:24] * m.scale).sum(),
}  # fmt: skip


def sharded(kind: str) -> dict[str, Any]:
    if kind.isdigit():
        return {"strategy": int(kind)}
    shape, outer = {"hsdp": ((2, 1), "no_shard"), "hfsdp": ((2, 1), "optim"), "inner": ((1, 2), "no_shard")}[kind]
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp_shard")), "outer_strategy": outer}


def step(name: str, kind: str, microbatches: int, lowering: str, hold: bool, times: float) -> tuple[float, float]:
    """Largest error of the loss and of any gradient; each rank has data, and weighs its losses, in its own way."""
    torch.manual_seed(0)
    reference = MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up", "down"], **sharded(kind))
    warnings.simplefilter("ignore")
    run = model if lowering == "none" else torch.compile(model, backend="mfsdp", options={"lowering": lowering})
    own = 1.0 + dist.get_rank()
    off = 0.0
    for i in range(microbatches):
        torch.manual_seed(10 * i + dist.get_rank())
        x = torch.randn(5, 24)
        model.set_requires_gradient_sync(i + 1 == microbatches, hold=hold)
        losses = [
            (r(x).square().mean() + times * PENALTIES[name](m)) * own for r, m in ((run, model), (reference,) * 2)
        ]
        off = max(off, error(losses[0].detach(), losses[1].detach()))
        for loss in losses:
            loss.backward()
    averaged(reference)
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert all((p.grad is None) == (q.grad is None) for p, q in pairs)
    return off, max(error(whole(p.grad), q.grad) for p, q in pairs if q.grad is not None)


@pytest.mark.parametrize("name", PENALTIES)
def test_every_penalty(two_ranks, name):
    for loss, grads in two_ranks.run(step, name, "3", 1, "none", False, 0.1):
        assert loss < 1e-5 and grads < 1e-5, name


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(PENALTIES)), kind=st.sampled_from(["0", "1", "2", "3", "hsdp", "hfsdp", "inner"]),
    microbatches=st.integers(1, 3), lowering=st.sampled_from(["eager", "none"]), hold=st.booleans(),
    times=st.sampled_from([0.01, 1.0]),
)  # fmt: skip
def test_penalties_with_strategies_and_microbatches(two_ranks, **drawn):
    for loss, grads in two_ranks.run(step, *drawn.values()):
        assert loss < 1e-5 and grads < 1e-5, drawn


@pytest.mark.inductor
def test_a_penalty_beside_generated_code(two_ranks):
    for loss, grads in two_ranks.run(step, "square", "3", 2, "inductor", False, 0.1, timeout=300):
        assert loss < 1e-5 and grads < 1e-5


def tied_and_checkpointed(recompute: bool) -> float:
    """A tied embedding whose weight the loss uses once more, as a head by hand; and a penalty on all."""
    torch.manual_seed(0)
    reference = GPT(recompute=recompute)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=[Block])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(31, (2, 8))
    for r, m in ((run, model), (reference, reference)):
        logits = r(ids)
        again = F.linear(logits @ torch.ones(31, 16), m.head.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 1e-3 * again.square().mean()
        (loss + 0.1 * sum(p.square().sum() for p in m.parameters())).backward()
    averaged(reference)
    return max(error(whole(p.grad), q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_tied_weights_and_checkpointing(two_ranks, recompute):
    assert max(two_ranks.run(tied_and_checkpointed, recompute)) < 1e-5


def hooked() -> tuple[int, int, float, float]:
    """Hooks see the sum of what model and penalty bring, once."""
    reference = MLP()
    for p in reference.parameters():
        dist.broadcast(p.data, 0)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up", "down"])
    run = torch.compile(model, backend="mfsdp", options={"lowering": "eager"})
    calls = {"hook": 0, "post": 0}

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        calls["hook"] += 1
        return grad.clamp(-0.1, 0.1)

    def post(param: torch.Tensor) -> None:
        calls["post"] += 1
        seen.append(whole(param.grad).clone())

    seen: list[torch.Tensor] = []
    model.up.weight.register_hook(clamp)
    model.up.weight.register_post_accumulate_grad_hook(post)
    x = torch.randn(3, 24)
    for r, m in ((run, model), (reference, reference)):
        (r(x).square().mean() + m.up.weight.square().sum()).backward()
    averaged(reference)
    want = reference.up.weight.grad.clamp(-0.1, 0.1)
    got = error(whole(model.up.weight.grad), want)
    only = model.up.weight.square().sum()
    model.zero_grad()
    only.backward()
    return calls["hook"], calls["post"], max(got, error(seen[0], want)), error(whole(model.up.weight.grad), want)


class Reentrant(nn.Module):
    """Two checkpoints, each a backward inside of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x


def nested() -> tuple[list[float], list[int]]:
    """Differences of gradients, and calls of post-accumulate hooks in two steps."""
    torch.manual_seed(0)
    reference = Reentrant()
    model = mfsdp.fully_shard(copy.deepcopy(reference), strategy="optim")
    calls = [0, 0]
    for number, m in enumerate((model, reference)):
        for layer in m.layers[:2]:
            layer.weight.register_hook(lambda grad: 2 * grad)

        def count(param: torch.Tensor, number: int = number) -> None:
            calls[number] += 1

        m.layers[2].bias.register_post_accumulate_grad_hook(count)
    found = []
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(3, 6)
        for m in (model, reference):
            m.zero_grad()
            (m(x).square().mean() + sum(p.norm() for p in m.parameters())).backward()
        averaged(reference)
        grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
        found += [error(whole(p), q) for p, q in grads if p is not None and q is not None]
    assert len(found) == 12
    return found, calls


def test_hooks_in_a_backward_inside_of_a_backward(two_ranks):
    """What the outer one brings waits for its own end."""
    for found, calls in two_ranks.run(nested):
        assert max(found) < 1e-6
        assert min(calls) >= 4  # once per backward at least


def test_hooks_see_the_sum_once(two_ranks):
    for hooks, posts, first, _ in two_ranks.run(hooked):
        assert hooks == posts == 2 and first < 1e-6


def others() -> None:
    """Frozen then thawed, asked for by autograd.grad, without a model's forward, with a divide factor, in a copy."""
    torch.manual_seed(0)
    reference = MLP()
    reference.up.requires_grad_(False)
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up"])
    for m in (model, reference):
        m.up.requires_grad_(True)
        (m.up.weight.square().sum() + m.up.weight.sum()).backward()
        m.up.weight.square().sum().backward()
    assert error(whole(model.up.weight.grad), reference.up.weight.grad) < 1e-6
    (asked,) = torch.autograd.grad(model.down.weight.square().sum(), [model.down.weight])
    assert torch.equal(whole(asked), 2 * reference.down.weight) and model.down.weight.grad is None
    model.set_gradient_divide_factor(1.0)
    model.down.weight.sum().backward()
    assert torch.equal(whole(model.down.weight.grad), torch.full_like(reference.down.weight, dist.get_world_size()))
    twin = copy.deepcopy(model)
    before = whole(model.down.weight.grad).clone()
    twin.down.weight.sum().backward()
    assert torch.equal(whole(model.down.weight.grad), before)
    assert torch.equal(whole(twin.down.weight.grad), 2 * before)
    rows = model.scale.to_local()
    (rows.square().sum() * (1 + dist.get_rank())).backward()
    assert torch.equal(model.scale.grad.to_local(), 2 * rows.detach() * (1 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="twice"):
        (grad,) = torch.autograd.grad(model.scale.sum().square(), [model.scale], create_graph=True)
        grad.sum().backward()


def different_numbers(summed: bool) -> str:
    model = mfsdp.fully_shard(MLP())
    with pytest.raises(RuntimeError) as caught:
        part = model.up.weight.detach().clone().requires_grad_() * (1 + dist.get_rank())
        part.square().sum() if summed else part.full_tensor()
    return str(caught.value)


@pytest.mark.parametrize("summed", [True, False])
def test_numbers_that_differ_by_rank_are_an_error(two_ranks, summed):
    for rank, text in enumerate(two_ranks.run(different_numbers, summed)):
        assert f"mul({1 + rank})" in text and "differ by rank" in text


def test_frozen_asked_divided_copied(two_ranks):
    two_ranks.run(others)


def modules() -> list[tuple[str, nn.Module, tuple[Any, ...]]]:
    """A module of every kind in torch.nn that has parameters, and what it may be called with."""
    x, image, seq = torch.randn(4, 6), torch.randn(2, 4, 8, 8), torch.randn(5, 2, 6)
    ids = torch.randint(7, (4, 3))
    return [
        (type(m).__name__, m, a)
        for m, *a in [
            (nn.Linear(6, 5), x), (nn.Bilinear(6, 6, 3), x, x), (nn.Embedding(7, 3), ids), (nn.EmbeddingBag(7, 3), ids),
            (nn.Conv1d(4, 3, 3), image[:, :, 0]), (nn.Conv2d(4, 6, 3, groups=2), image),
            (nn.Conv3d(2, 3, 3), image[None, :, :3]),
            (nn.ConvTranspose1d(4, 3, 3), image[:, :, 0]), (nn.ConvTranspose2d(4, 3, 3), image),
            (nn.ConvTranspose3d(2, 3, 3), image[None, :, :3]), (nn.LayerNorm(6), x), (nn.RMSNorm(6), x),
            (nn.GroupNorm(2, 4), image), (nn.BatchNorm1d(6), x), (nn.BatchNorm2d(4), image),
            (nn.InstanceNorm2d(4, affine=True), image), (nn.PReLU(), x), (nn.PReLU(6), x), (nn.RNN(6, 3), seq),
            (nn.GRU(6, 3), seq), (nn.LSTM(6, 3, bidirectional=True), seq), (nn.RNNCell(6, 3), x), (nn.GRUCell(6, 3), x),
            (nn.LSTMCell(6, 3), x), (nn.MultiheadAttention(6, 2), seq, seq, seq),
            (nn.TransformerEncoderLayer(6, 2, 8, 0.0), seq), (nn.TransformerDecoderLayer(6, 2, 8, 0.0), seq, seq),
            (nn.AdaptiveLogSoftmaxWithLoss(6, 9, [3, 6]), x, torch.tensor([0, 4, 7, 2])),
        ]
    ]  # fmt: skip


def first(out: Any) -> torch.Tensor:
    while not isinstance(out, torch.Tensor):
        out = out[0]
    return out


def every_module() -> list[str]:
    """Each module's own forward, called by somebody else with sharded parameters: which went wrong."""
    bad = []
    torch.manual_seed(0)
    for name, reference, _ in modules():
        model = mfsdp.fully_shard(copy.deepcopy(reference))
        torch.manual_seed(1 + dist.get_rank())
        args = next(a for n, m, a in modules() if n == name and repr(m) == repr(reference))
        caller = copy.deepcopy(reference)
        params = dict(model.named_parameters())
        first(torch.func.functional_call(caller, params, tuple(args))).square().mean().backward()
        first(reference(*args)).square().mean().backward()
        averaged(reference)
        for n, q in reference.named_parameters():
            got = whole(params[n].grad)
            if got is None or error(got, q.grad) > 1e-4:
                bad.append(f"{name}.{n}: {'no gradient' if got is None else error(got, q.grad)}")
    return bad


def test_every_module_of_torch(two_ranks):
    """No function of torch.nn loses a gradient because nobody has thought of it."""
    kinds = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    assert len({n for n, *_ in modules()} & kinds) > 20
    assert two_ranks.run(every_module, timeout=300) == [[], []]


def every_operator(stride: int) -> tuple[int, list[str]]:
    """Operators that torch tests, with their first tensor sharded: how many are right, and which are wrong."""
    from torch.testing._internal.common_methods_invocations import op_db

    right, bad = 0, []
    for op in op_db[::stride]:
        if not op.supports_autograd or torch.float32 not in op.supported_dtypes("cpu") or "rand" in op.name:
            continue
        torch.manual_seed(0)
        try:
            sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)), None)
        except Exception:
            continue
        plain = None if sample is None else sample.input
        fits = isinstance(plain, torch.Tensor) and plain.is_floating_point() and plain.layout is torch.strided
        if not fits or not plain.dim() or not plain.numel():
            continue
        holder = nn.ParameterList([nn.Parameter(plain.clone())])
        model = mfsdp.fully_shard(copy.deepcopy(holder))
        torch.manual_seed(3)
        verdict = _compare_operator(op, holder, model, sample)
        right += verdict == "right"
        if verdict not in ("right", "refused", "of no use"):
            bad.append(f"{op.name}: {verdict}")
    return right, bad


def _compare_operator(op: Any, holder: nn.Module, model: nn.Module, sample: Any) -> str:
    weight = 1.0 + dist.get_rank()
    try:
        torch.manual_seed(4)
        want = first(op(holder[0], *sample.args, **sample.kwargs))
        (want.sum() * weight).backward()
    except Exception:
        return "of no use"
    if holder[0].grad is None or not want.is_floating_point():
        return "of no use"
    holder[0].grad = holder[0].grad.clone()
    averaged(holder)
    try:
        torch.manual_seed(4)
        got = first(op(model[0], *sample.args, **sample.kwargs))
        total = got.sum() * weight
    except NotImplementedError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:150]
    try:
        total.backward()
    except Exception as error:
        return f"in backward, {type(error).__name__}: {error}"[:200]
    grad = whole(model[0].grad)
    if grad is None:
        return "no gradient"
    close = torch.allclose(grad, holder[0].grad, 1e-3, 1e-4, equal_nan=True)
    return "right" if close else f"off by {(grad - holder[0].grad).abs().max()}"


@pytest.mark.slow
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_operator_of_torch(two_ranks, stride):
    for right, bad in two_ranks.run(every_operator, stride, timeout=500):
        assert not bad, "\n".join(bad)
        assert right > 300 // stride


def test_functions_are_told_by_what_they_are():
    for function in (torch.square, torch.Tensor.__rsub__, torch.Tensor.__pow__, torch.Tensor.__truediv__, F.gelu):
        assert way_of(function) is Way.ELEMENTWISE, function
    for function in (F.linear, torch.Tensor.__getitem__, torch.Tensor.T.__get__, F.cross_entropy, torch.cat):
        assert way_of(function) is Way.OTHER, function
    for function in (torch.Tensor.add_, torch.Tensor.shape.__get__, torch.Tensor.detach, torch.Tensor.backward):
        assert way_of(function) is Way.NATIVE, function
