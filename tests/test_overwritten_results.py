"""Gradients in the memory of forward's results, where nothing holds these any more (Note [Overwritten results])."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import config as functorch_config
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp
from mfsdp.compiler import capture, stitched
from mfsdp.runtime import kernels
from tests.helpers.without_inductor import without_inductor

WORDS = 64


class Net(nn.Module):
    """A layer, which is a unit, and a head; returns the loss beside what it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.layer(x).tanh())
        return logits.logsumexp(-1).square().sum(), logits


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MIN_OVERWRITTEN", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether backward has found each result that it may overwrite unheld."""
    found: list[bool] = []
    unheld = stitched.unheld

    def spy(x: torch.Tensor) -> bool:
        found.append(unheld(x))
        return found[-1]

    monkeypatch.setattr(stitched, "unheld", spy)
    yield found


class Pair:
    """A model and its sharded, compiled copy."""

    def __init__(self, net: type[nn.Module] = Net, **options: Any):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain = net()
        self.model = mfsdp.fully_shard(copy.deepcopy(self.plain), units=["layer"], device="cpu")
        self.run = torch.compile(self.model, backend="mfsdp", options={"lowering": "stitched", **options})

    def compare(self, differentiate: Callable[[list[torch.Tensor]], Any]) -> None:
        """Differentiates results of both, in a list that ``differentiate`` may empty. What it returns must stay."""
        kept = []
        for run in (self.plain, self.run):
            run.zero_grad()
            kept.append(differentiate(list(run(inputs()))))
        assert kept[0] is None or torch.allclose(*kept)
        for mine, theirs in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            torch.testing.assert_close(theirs.grad.full_tensor(), mine.grad)  # type: ignore[attr-defined]


def given_up(out: list[torch.Tensor]) -> None:
    loss = out[0]
    out.clear()
    loss.backward()


def held(out: list[torch.Tensor]) -> torch.Tensor:
    out[0].backward()
    return out[1]


def held_by_a_view(out: list[torch.Tensor]) -> torch.Tensor:
    loss, view = out[0], out[1].detach()[1:]
    out.clear()
    loss.backward()
    return view


def held_by_numpy(out: list[torch.Tensor]) -> torch.Tensor:
    loss, array = out[0], out[1].detach().numpy()
    out.clear()
    loss.backward()
    return torch.tensor(array)


def held_by_its_storage(out: list[torch.Tensor]) -> torch.Tensor:
    loss, storage = out[0], out[1].untyped_storage()
    out.clear()
    loss.backward()
    return torch.empty(0).set_(storage, 0, (4, 6, WORDS))  # type: ignore[call-overload, no-any-return]


def held_by_autograd(out: list[torch.Tensor]) -> None:
    """A second loss saves the logits, and is differentiated later."""
    loss, other = out[0], out[1].square().sum()
    out.clear()
    (loss + other).backward()


def held_by_a_hook(out: list[torch.Tensor]) -> torch.Tensor:
    loss, logits, seen = out[0], out[1], list[torch.Tensor]()
    out.clear()
    logits.register_hook(partial(lambda values, grad: seen.append(values), logits.detach()))
    both = loss + 0 * logits.sum()
    del logits
    both.backward()
    return seen[0]


HELD = [held, held_by_a_view, held_by_numpy, held_by_its_storage, held_by_a_hook]


@pytest.mark.parametrize("differentiate", HELD, ids=lambda f: f.__name__)
def test_what_the_caller_holds_stays(differentiate: Callable[..., Any], asked: list[bool]) -> None:
    with without_inductor(overwrite=True):
        pair = Pair()
        pair.compare(given_up)
        pair.compare(differentiate)
        pair.compare(given_up)
    assert asked == [True, False, True]


def test_what_another_loss_saves_stays_until_it_is_differentiated(asked: list[bool]) -> None:
    with without_inductor(overwrite=True):
        Pair().compare(held_by_autograd)
    assert asked == [True]


def test_saved_tensor_hooks_may_hold_it(asked: list[bool]) -> None:
    """Also the very tensor that backward gets."""
    packed: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(x)
        return x

    with without_inductor(overwrite=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        Pair().compare(given_up)
    assert asked == [False] and all(x.isfinite().all() for x in packed if x.shape[-1] == WORDS)


class Dispatched(TorchDispatchMode):
    """Holds all that operators return, and aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.seen += [out, out.detach()] if isinstance(out, torch.Tensor) else []
        return out


class Called(TorchFunctionMode):
    """Holds all that functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function(*args, **(kwargs or {})))
        return self.seen[-1]


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_modes_that_hold_all_tensors(mode: Any, asked: list[bool]) -> None:
    """Neither what a caller holds looks unheld, nor what nobody holds looks held."""

    def differentiate(out: list[torch.Tensor]) -> torch.Tensor:
        with mode():
            out[0].backward()
        return out[1]

    def gives_up(out: list[torch.Tensor]) -> None:
        with mode():
            given_up(out)

    with without_inductor(overwrite=True):
        pair = Pair()
        pair.compare(differentiate)
        pair.compare(gives_up)
    assert asked == [False, True]


def test_gradients_in_the_place_of_results_are_not_of_autograds_graph(asked: list[bool]) -> None:
    """As large as a result: the gradient of the input."""

    class Same(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.exp()
            return super().forward(y)[0] + y.square().sum(), y

    with without_inductor(overwrite=True):
        pair = Pair(Same)
        for holds in (False, True):
            found = []
            for run in (pair.plain, pair.run):
                x = inputs().requires_grad_()
                loss, y = run(x)
                place = y.data_ptr()
                if not holds:
                    del y
                found += torch.autograd.grad(loss, x)
            assert found[1].is_leaf and not found[1].requires_grad
            assert (found[1].data_ptr() == place) != holds
            torch.testing.assert_close(*found)
    assert asked == [True, False]


def test_memory_that_others_own_too() -> None:
    array = np.zeros(3, dtype=np.float32)
    assert stitched.unheld(torch.zeros(3))
    for make in (torch.from_numpy, torch.from_dlpack, lambda a: torch.tensor(a).share_memory_()):
        assert not stitched.unheld(make(array))


def test_no_body_runs_first_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch, asked: list[bool]) -> None:
    called: list[str] = []

    def body(name: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
        called.append(name)
        return [given.pop() + 1]

    text = "def call(Args):\n    Given = Args\n    return Chosen('Body0', Given, [0])(Given)\n"
    bodies = {name: partial(body, name) for name in ("Body0", f"Body0{stitched.IN_PLACE}")}
    run = stitched.Stitched(text, bodies, {name: [0] for name in bodies}, {})
    for recording in (True, False, True):
        monkeypatch.setattr(stitched, "is_recording", lambda recording=recording: recording)
        run([torch.zeros(1)])
    assert asked == [True, True, True] and called == ["Body0", "Body0InPlace", "Body0InPlace"]


@pytest.mark.parametrize("option", [{"lowering": "whole"}, {"cuda_graph": "programs"}, None], ids=str)
def test_what_is_never_overwritten(option: dict[str, str] | None, asked: list[bool]) -> None:
    with without_inductor(overwrite=True), functorch_config.patch(donated_buffer=option is not None):
        Pair(**(option or {})).compare(given_up)
    assert asked == []


def test_small_results_are_not_worth_a_second_body(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MIN_OVERWRITTEN", 4 * 4 * 6 * WORDS + 1)
    with without_inductor(overwrite=True):
        Pair().compare(given_up)
    assert asked == []


@pytest.mark.inductor
def test_inductor_computes_the_gradient_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with code from the compile cache."""
    gradients: list[int] = []
    add = kernels.add_tangent

    def spy(run: Any, grad: torch.Tensor, tangent: torch.Tensor | None) -> None:
        gradients.append(grad.data_ptr())
        add(run, grad, tangent)

    monkeypatch.setattr(kernels, "add_tangent", spy)
    results: list[int] = []

    def noted(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: list[torch.Tensor]) -> Any:
            results.append(out[1].data_ptr())
            return differentiate(out)

        return call

    for _ in range(2):
        pair = Pair()
        for differentiate in (given_up, held, given_up):
            pair.compare(noted(differentiate))
    same = [a == b for a, b in zip(gradients, results[1::2], strict=True)]
    assert same == 2 * [True, False, True]


@pytest.mark.slow
def test_the_ledger_counts_them_once() -> None:
    """The peak is that of a model that returns its loss alone, and a note says on what that depends; plans do not."""

    class Alone(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    def peak(net: type[nn.Module], note: bool, **options: Any) -> int:
        with torch.device("meta"):
            report = mfsdp.explain(net(), (inputs(),), units=["layer"], suggest=False, options=options)
        text = "backward overwrites 6K of forward's results unless the caller still holds them"
        assert report.notes == [text] * note
        return report.ledger.peak

    def planned(net: type[nn.Module]) -> int:
        with torch.device("meta"):
            return mfsdp.plan(net(), (inputs(),), units=["layer"], memory="1GB").peak

    logits = 4 * 4 * 6 * WORDS
    assert peak(Net, True) == peak(Alone, False)
    assert peak(Net, False, cuda_graph="programs") >= peak(Alone, False) + logits
    assert planned(Net) > planned(Alone)
