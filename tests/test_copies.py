"""What forward saves of parameters is computed again in backward, or told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import backend
from mfsdp.ir.saved_copies import copies

LIBRARY = torch.library.Library("mfsdp_copies", "DEF")
LIBRARY.define("linear(Tensor x, Tensor w) -> (Tensor, Tensor, Tensor)")


def _linear(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x @ w.t(), w.half(), w.t().half().contiguous()


LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("mfsdp_copies::linear", _linear, lib=LIBRARY)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor, torch.Tensor]:
    x, half, turned = ctx.saved_tensors
    return grad @ half.to(grad.dtype), grad.t() @ x + 0 * turned.t()


torch.library.register_autograd("mfsdp_copies::linear", _backward, setup_context=_keep, lib=LIBRARY)


class Weighted(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(24, 16))
        self.register_buffer("turn", torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x, self.weight, self.turn)


BUFFERS = "from parameters and buffers or random numbers"
OPAQUE = "by mfsdp_copies::linear"
CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "plain": (lambda: nn.Linear(16, 24), set()),
    "of parameters alone": (lambda: weight_norm(nn.Linear(16, 24)), set()),
    "a product of parameters": (lambda: Weighted(lambda x, w, turn: F.linear(x, w @ w.t() @ w)), set()),
    "a buffer": (lambda: Weighted(lambda x, w, turn: F.linear(x, w @ turn)), {BUFFERS}),
    "random numbers": (lambda: Weighted(lambda x, w, turn: F.linear(x, w @ torch.rand_like(turn))), {BUFFERS}),
    "activations": (lambda: Weighted(lambda x, w, turn: F.linear(x, w * x.mean())), set()),
    "an operator's own": (lambda: Weighted(lambda x, w, turn: torch.ops.mfsdp_copies.linear(x, w)[0]), {OPAQUE}),
}


def traced(build: Callable[[], nn.Module], lowering: str = "eager", **sharding: Any) -> Any:
    model = nn.Sequential(nn.Linear(16, 16), build())
    return mfsdp.trace(model, (torch.randn(5, 16),), world=2, units=["1"], lowering=lowering, **sharding)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", CASES)
def test_copies_are_found(name, lowering):
    build, want = CASES[name]
    forward = traced(build, lowering).forward
    assert {how for _, how in copies(forward)} == want
    text = pipeline.run(forward)["gather"].listing
    assert ("forward saves" in text) == bool(want) and all(how in text for how in want)


def test_generators_states_are_no_copies():
    """Under Inductor, which draws without a state, the product itself may be saved, and is found."""

    def build() -> nn.Module:
        return Weighted(lambda x, w, turn: F.linear(x, F.dropout(w)))

    assert not copies(traced(build).forward)
    assert {how for _, how in copies(traced(build, "inductor").forward)} == {BUFFERS}


def test_units_that_stay_whole_are_left_alone():
    assert not copies(traced(CASES["an operator's own"][0], reshard_after_forward=False).forward)


@pytest.mark.slow
def test_it_is_said_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(backend, "_warned_copies", set())
    monkeypatch.setattr(backend.log, "warning", lambda text, *args: said.append(text % args))
    for width in (4096, 16, 16):
        torch._dynamo.reset()
        wide = nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16))
        with mfsdp.fake_ranks(2):
            model = mfsdp.fully_shard(nn.Sequential(wide, CASES["an operator's own"][0]()), units=["1"])
            torch.compile(model, backend="mfsdp", options={"lowering": "eager"})(torch.randn(5, 16))
        assert width == 16 or not any("saves" in text for text in said), "less than a hundredth"
    said = [text for text in said if "saves" in text]
    assert len(said) == 1 and "forward saves 2K of parameters' shapes" in said[0] and OPAQUE in said[0]
