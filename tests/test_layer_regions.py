"""Equal layers that Dynamo traces once (Note [Layer regions]): the programs of a trace of every layer, always."""

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

import mfsdp
from mfsdp.compiler import layer_regions, tracing

pytestmark = pytest.mark.slow

DEPTH, WIDTH = 5, 8
COUNT = [0]
BY_MODULE: dict[nn.Module, int] = {}


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Layer(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.index = index
        self.up = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []
        self.scale: Any = None

    def change(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None, by: int = 1) -> torch.Tensor:
        x = x * by + self.change(self.up(x).relu())
        return x if mask is None else x * mask


class Root(nn.Module):
    def __init__(self, layer: type[Layer]):
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([layer(i) for i in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 16)

    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x, mask=self.embedding.weight[0])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            x = self.each(number, layer, x)
        return self.head(x).sum()


def reading(change: Callable[[Any, torch.Tensor], torch.Tensor], **scales: Callable[[int], object]) -> type[Layer]:
    """A kind of layer that does this to its values, and whose attribute ``scale`` depends on its number."""

    class Reading(Layer):
        def __init__(self, index: int):
            super().__init__(index)
            for scale in scales.values():
                self.scale = scale(index)

    Reading.change = change  # type: ignore[method-assign, assignment]
    return Reading


def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


def noted(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen.append(len(self.seen))
    return x * (1 + len(self.seen))


def closed(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * number


class Stepped(Root):
    """What the root does depends on the layer's number."""

    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(x if number != 3 else x.mul(3), mask=self.head.weight[0] if number % 2 else None)
        return out


class Passing(Root):
    """It passes numbers on, of a tuple and of a list."""

    def __init__(self, layer: type[Layer]):
        super().__init__(layer)
        self.tuple, self.list = (2, 2, 3, 2, 2), [2, 2, 2, 3, 2]

    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(layer(x, by=self.tuple[number]), by=self.list[number])
        return out


class Now:
    by = 1


class Setting(Root):
    """Layers read what it sets."""

    def __init__(self, layer: type[Layer]):
        super().__init__(layer)
        self.now = Now()
        for x in self.layers:
            x.scale = self.now  # type: ignore[assignment]

    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.now.by = number
        out: torch.Tensor = layer(x)
        return out


class Global(Root):
    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        COUNT[0] = number
        out: torch.Tensor = layer(x)
        return out


class Resting(Root):
    """The first layers get no gradients."""

    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(number > 1):
            out: torch.Tensor = layer(x.detach() if number < 3 else x)
            return out


class Autocast(Root):
    def each(self, number: int, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=number > 1):
            out: torch.Tensor = layer(x)
            return out


def called(x: torch.Tensor, self: Any) -> torch.Tensor:
    return self.scale(x)  # type: ignore[no-any-return]


KINDS: dict[str, type[Layer]] = {
    "equal": Layer,
    "its number": reading(lambda self, x: x * self.index),
    "every second": reading(lambda self, x: x * 2 if self.scale else x, of=lambda i: i % 2),
    "a constant": reading(lambda self, x: x * self.scale, of=lambda i: 2 if i == 4 else 3),
    "of a namespace": reading(lambda self, x: x * self.scale.by, of=lambda i: SimpleNamespace(by=2 if i == 4 else 3)),
    "of a dictionary": reading(lambda self, x: x * self.scale["by"], of=lambda i: {"by": 2 if i == 4 else 3}),
    "a dictionary's length": reading(
        lambda self, x: x * len(self.scale), of=lambda i: dict.fromkeys(range(1 + i // 4))
    ),
    "a tuple": reading(lambda self, x: x * self.scale[-1], of=lambda i: (1,) * i + (2 if i > 3 else 3,)),
    "an enum": reading(lambda self, x: x * 2 if self.scale is Kind.ONE else x, of=lambda i: Kind(1 + i // 4)),
    "a closure": reading(lambda self, x: called(x, self), of=lambda i: closed(2 if i == 4 else 3)),
    "a partial": reading(lambda self, x: called(x, self), of=lambda i: functools.partial(torch.mul, other=1 + i // 4)),
    "a type": reading(lambda self, x: x * 2 if isinstance(self.scale, str) else x, of=lambda i: "" if i == 4 else 0),
    "an attribute's presence": reading(
        lambda self, x: x * 2 if hasattr(self.scale, "by") else x,
        of=lambda i: SimpleNamespace(**({"by": 1} if i == 4 else {})),
    ),
    "a tensor": reading(lambda self, x: x * self.scale, of=lambda i: torch.ones(1 if i == 4 else WIDTH)),
    "a global": reading(counted),
    "a list of its own": reading(noted),
    "a global by module": reading(lambda self, x: x * BY_MODULE.get(self, 3)),
    "dropout": reading(lambda self, x: nn.functional.dropout(x, 0.1)),
}


def hooked(model: Root) -> None:
    model.layers[4].up.register_forward_hook(lambda module, given, out: out * 2)


def replaced(model: Root) -> None:
    layer = model.layers[4]
    layer.up.forward = lambda x: nn.functional.linear(x, layer.up.weight) * 2  # type: ignore[union-attr]


def hooked_alone(model: Root) -> None:
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda module, given, out, i=i: out * i)


def shared(model: Root) -> None:
    """The first layer's weight is also the embedding's, read before."""
    model.embedding.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
    model.layers[0].up.weight = model.embedding.weight  # type: ignore[union-attr]


def tied(model: Root) -> None:
    model.layers[1].up.weight = model.layers[2].up.weight


def frozen(model: Root) -> None:
    model.layers[4].up.requires_grad_(False)


def resting(model: Root) -> None:
    model.layers[4].train(False)


CHANGES: dict[str, Callable[[Root], object]] = {
    f.__name__: f for f in (hooked, replaced, hooked_alone, shared, tied, frozen, resting)
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    COUNT[0] = 0
    yield
    BY_MODULE.clear()


def graphs(model: nn.Module, monkeypatch: pytest.MonkeyPatch, regions: bool, **sharding: Any) -> tuple[list[str], int]:
    """Listings of the programs, and number of layers that were not traced; 0 if all were traced again."""
    calls: list[int] = []

    def counting(gm: fx.GraphModule) -> None:
        found = gm.graph.find_nodes(op="call_function", target=layer_regions.CALL)
        calls.append(len(found) - len({node.args[1] for node in found}))
        expand(gm)

    expand = layer_regions.expand
    with monkeypatch.context() as patch:
        patch.setattr(tracing.layer_regions, "expand", counting)
        patch.setattr(layer_regions, "MIN_LAYERS", 4 if regions else DEPTH + 1)
        COUNT[0] = 0
        programs = mfsdp.trace(model, (torch.zeros(2, 3, dtype=torch.long),), world=4, **sharding)
    return [mfsdp.pipeline.run(p, upto="capture")["capture"].listing for p in programs], calls[-1]


def check(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **sharding: Any) -> int:
    (whole, none), (now, calls) = (graphs(model, monkeypatch, on, **sharding) for on in (False, True))
    assert now == whole and none == 0
    if not hasattr(torch._guards, "InvokeSubgraphReuseCondition"):  # torch 2.11
        pytest.skip("this torch traces every layer")
    return calls


SHARED = {"equal": 4, "every second": 3, "a constant": 3, "of a namespace": 3, "a tensor": 3, "dropout": 4}
"""Number of layers that are not traced; the rest only has to be right."""


FAST = ("equal", "every second", "a closure", "hooked", "shared")


def sample(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("kind", sample(KINDS))
def test_a_layer_that_reads(kind, monkeypatch):
    with torch.device("meta"):
        model = Root(KINDS[kind])
    BY_MODULE[model.layers[4]] = 2
    found = check(model, monkeypatch, units=[Layer])
    assert found == SHARED.get(kind, found)


@pytest.mark.parametrize("change", sample(CHANGES))
def test_a_layer_that_has_been_changed(change, monkeypatch):
    with torch.device("meta"):
        model = Root(Layer)
        CHANGES[change](model)
    check(model, monkeypatch, units=[Layer])


def test_the_same_elsewhere(monkeypatch):
    """Layers in one flat buffer, with other places each; a root that treats layers in different ways; inference."""
    with torch.device("meta"):
        model, stepped = Root(Layer), Stepped(Layer)
    assert check(model, monkeypatch) == 0
    by_now = reading(lambda self, x: x * self.scale.by)
    by_global = reading(lambda self, x: x * COUNT[0])
    for root, layer in ((Passing, Layer), (Setting, by_now), (Global, by_global), (Resting, Layer), (Autocast, Layer)):
        with torch.device("meta"):
            other = root(layer)
        assert check(other, monkeypatch, units=[Layer]) == (8 if root is Passing else 0), root
    assert check(stepped, monkeypatch, units=[Layer]) == 3  # without and with a mask
    assert check(model, monkeypatch, units=[Layer], train=False) == 4
    assert all(type(m).__name__ != "Layer" or type(m) is Layer for m in model.modules())
