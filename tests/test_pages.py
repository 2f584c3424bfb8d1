"""Pages for those who begin: their code runs as it stands, and what they quote is what is said."""

from __future__ import annotations

import ast
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from functorch.compile import config as functorch_config
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import mfsdp
from tests.helpers.models import MLP

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(page: str, kind: str = "python") -> list[str]:
    """What is fenced on a page, README.md or one of docs."""
    fenced = re.findall(
        r"^```(\w*)\n(.*?)^```$",
        (ROOT / page if page == "README.md" else DOCS / page).read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return [text for of, text in fenced if of == kind]


@contextmanager
def here(folder: str) -> Iterator[None]:
    home = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(home)


def run(page: str, code: str, names: dict[str, Any] | None = None, **options: str) -> dict[str, Any]:
    """What a script of a page leaves: in a group that is there already, ATen kernels one by one."""
    options = {"lowering": "eager", **options}
    code = code.replace('backend="mfsdp"', f'backend="mfsdp", options={options}')
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return execute(page, code, names)


def execute(page: str, code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Names of a module that is code of a page: Dynamo looks modules up."""
    module = sys.modules["page"] = types.ModuleType("page")
    vars(module).update(names or {})
    exec(compile(code, page, "exec"), vars(module))
    return vars(module)


# README.md


class Said(NamedTuple):
    loss: torch.Tensor


class Llama(nn.Module):
    """What README.md's script leaves to the reader."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = Layers(layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Said:
        return Said(nn.functional.mse_loss(self.model(x), labels))


def the_readme(folder: str) -> tuple[float, bool]:
    """Its last loss, and whether what is loaded in another run is what was saved."""
    script, load = blocks("README.md")[:2]
    with here(folder):
        loader = [{"x": x, "labels": y} for x, y in (microbatches(step)[0] for step in range(3))]
        names = {"Llama": Llama, "config": 2, "TransformerBlock": Layer, "loader": loader}
        left = run("README.md", script, names)
        start = script.index("\nfor batch in loader:")
        again = run("README.md", script[:start] + "\n" + load, names)
        want, got = (dict(m["model"].state_dict()) for m in (left, again))
        moments = [[s["exp_avg"].full_tensor() for s in m["optim"].state.values()] for m in (left, again)]
        alike = all(torch.equal(want[n].full_tensor(), got[n].full_tensor()) for n in want)
        return left["loss"].item(), alike and all(map(torch.equal, *moments))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_readme_trains_saves_and_loads(two_ranks, tmp_path):
    for loss, alike in two_ranks.run(the_readme, str(tmp_path), timeout=200):
        assert loss < 10 and alike


# docs/tutorial.md


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def the_tutorial(folder: str) -> dict[str, Any]:
    """Losses of its scripts, and whether what was loaded is what was saved."""
    script, _, narrow, loop, plain, shared = blocks("tutorial.md")
    head, tail = script.split("\nfor step in range(STEPS):", 1)
    assert tail.endswith("\ndist.destroy_process_group()\n")
    out: dict[str, Any] = {}
    with here(folder):
        first = run("tutorial.md", script, dump="seen")
        out["loss"] = first["mean"].item() / dist.get_world_size()
        line = "mfsdp.fully_shard(model, units=[Block])\n"
        assert head.count(line) == 1
        second = run("tutorial.md", head.replace(line, narrow) + "\nfor step in range(STEPS):" + tail)
        out["bf16"], out["dtype"] = second["mean"].item() / dist.get_world_size(), second["loss"].dtype
        stopped = run("tutorial.md", head.replace("STEPS = 40", "STEPS = 25") + "\n" + loop)
        assert stopped["start"] == 0 and stopped["checkpoints"].steps() == [10, 20]
        resumed = run("tutorial.md", head + "\n" + loop)
        assert resumed["start"] == 20 and resumed["checkpoints"].steps() == [30, 40]
        want, got = whole(first["model"]), whole(resumed["model"])
        out["resumed"] = all(torch.equal(want[n], got[n]) for n in want)
        for way in (plain, shared):
            load = max(way.rfind("weights, moments = "), way.rfind("mfsdp.load"))
            exec(way[:load], resumed)
            with torch.no_grad():
                for p in resumed["model"].parameters():
                    p.zero_()
            exec(way[load:], resumed)
            got = whole(resumed["model"])
            out["loaded"] = out.get("loaded", True) and all(torch.equal(want[n], got[n]) for n in want)
    return out


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_tutorial_trains_stops_and_goes_on(two_ranks, tmp_path):
    for out in two_ranks.run(the_tutorial, str(tmp_path), timeout=300):
        assert out["loss"] < 0.6 and abs(out["bf16"] - out["loss"]) < 0.1 and out["dtype"] is torch.bfloat16, out
        assert out["resumed"] and out["loaded"], out
    seen = "".join(p.read_text() for p in (tmp_path / "seen").glob("graph*.forward.*.assign_groups.txt"))
    lines = "".join(blocks("tutorial.md", "")).splitlines()
    shown = [line for line in lines if line.startswith(("; ", ". ", "* ", "<-"))]
    assert len(shown) > 3
    there = {
        " ".join(line.split()) for line in seen.splitlines()
    }  # columns are wider where Inductor takes layers apart
    assert {" ".join(line.split()) for line in shown} <= there, seen


@pytest.mark.slow
def test_what_the_tutorial_asks_before_it_runs(capsys):
    script, question = blocks("tutorial.md")[:2]
    execute("tutorial.md", script[: script.index("\ndef batch")] + question)
    assert "on 64 ranks" in capsys.readouterr().out


def test_commands_of_the_tutorial_are_there():
    from mfsdp.cli.main import main

    lines = [line for line in "".join(blocks("tutorial.md", "")).splitlines() if line.startswith("mfsdp ")]
    assert len(lines) == 2
    for line in lines:
        with pytest.raises(SystemExit) as left:
            main([line.split()[1], "--help"])
        assert left.value.code == 0


# docs/from_fsdp2.md


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Layers(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def microbatches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [(torch.randn(6, 7, generator=random), torch.randn(6, 7, generator=random)) for _ in range(2)]


def both_scripts() -> tuple[list[float], list[float]]:
    theirs, ours = blocks("from_fsdp2.md")
    found = []
    for code in (theirs, ours):
        names: dict[str, Any] = {"build": Layers, "microbatches": microbatches, "losses": []}
        found.append(run("from_fsdp2.md", code, names)["losses"])
    return found[0], found[1]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_scripts_have_the_same_losses(two_ranks):
    for theirs, ours in two_ranks.run(both_scripts, timeout=200):
        assert len(ours) == 4 and ours[-1] < ours[0]
        assert ours == pytest.approx(theirs, rel=1e-5), (theirs, ours)


def test_calls_of_the_page_are_there():
    """Names in code on the right, and refusals of what the left says is refused."""
    text = (DOCS / "from_fsdp2.md").read_text()
    model = mfsdp.fully_shard(MLP())
    methods = [name for name in re.findall(r"`((?:set_|unshard|reshard)\w*)`", text) if name != "set_state_dict"]
    assert len(methods) > 10 and all(hasattr(model, name) for name in methods)
    refused = [name for name in methods if re.search("prefetch|hook|custom", name)]
    assert len(refused) == 5
    for name in refused:
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            getattr(model, name)(None)


# docs/guides/troubleshooting.md


HOLE = "\x00"
"""What an f-string fills in."""


def said(node: ast.AST) -> str:
    """The text of an expression, with holes."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(said(v) for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left) + said(node.right)
    if isinstance(node, ast.FormattedValue):
        return HOLE
    return HOLE


def texts() -> list[str]:
    """Everything that the source can say, of whatever length: strings, those that are put together, log formats."""
    found = []
    for folder in (ROOT / "src" / "mfsdp", ROOT / "passes"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                    found.append(re.sub(r"%[a-z]", HOLE, said(node)))
    return found


def quotes() -> list[str]:
    """First cells of its tables, but for those of torch's own words."""
    page = (DOCS / "guides/troubleshooting.md").read_text().partition("\n## Errors from PyTorch")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return [re.sub(r"^\| `+ ?(.*?) ?`+ \|.*$", r"\1", row) for row in rows]


def pattern(quote: str) -> str:
    return ".*".join(re.escape(part) for part in quote.split("..."))


@pytest.mark.slow
def test_every_quoted_text_is_said_somewhere():
    there = [text for text in texts() if len(text) > 10]
    lost = [q for q in quotes() if not any(re.search(pattern(q), text, re.DOTALL) for text in there)]
    assert not lost, "\n".join(lost)
    assert 25 <= len(quotes()) == len(set(quotes()))


@pytest.mark.slow
def test_a_text_that_nobody_says_is_noticed():
    there = texts()
    for quote in ("there is no such text ... anywhere", "would run ... different ... models"):
        assert not any(re.search(pattern(quote), text, re.DOTALL) for text in there)


def one() -> nn.Module:
    return mfsdp.fully_shard(MLP())


def called(options: dict[str, Any] | None = None, model: nn.Module | None = None, **more: Any) -> Any:
    given = {"options": {"lowering": "eager", **(options or {})}} if options is not None else {}
    return torch.compile(model or one(), backend="mfsdp", **given, **more)(torch.ones(2, 24))


def optimizer_before() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters())
    mfsdp.fully_shard(model)
    assert optimizer


def step_compiled() -> None:
    model = one()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()


def fresh_optimizer(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model = one()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=folder / "ckpt")
    fresh = torch.optim.AdamW(model.parameters())
    dcp.load({"optim": fresh.state_dict()}, checkpoint_id=folder / "ckpt")


def not_finite() -> None:
    model = one()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    mfsdp.check_finite(model, of="weights")


def replaced() -> None:
    model = one()
    name, _ = next(iter(model.named_parameters()))
    owner = model.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Parameter(torch.ones(2)))


PROVOKED: dict[str, Callable[[Path], object]] = {
    "units: ... matches no module of": lambda _: mfsdp.fully_shard(MLP(), units=["polo"]),
    "is sharded already. Call it once per module": lambda _: mfsdp.fully_shard(one()),
    "build the optimizer after fully_shard, from model.parameters()": lambda _: optimizer_before(),
    "only floating-point parameters can be sharded": lambda _: mfsdp.fully_shard(
        nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)])
    ),
    "gradients of sharded parameters are dense": lambda _: mfsdp.fully_shard(nn.Embedding(4, 4, sparse=True)),
    "writes to its parameter": lambda _: mfsdp.fully_shard(nn.Embedding(4, 4, max_norm=1.0)),
    "offloading is not supported": lambda _: mfsdp.fully_shard(
        MLP(), offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()
    ),
    "resharding to a smaller group": lambda _: mfsdp.fully_shard(MLP(), reshard_after_forward=2),
    "does not know the option": lambda _: called({"polo": 1}),
    "does not support mode=": lambda _: called(mode="max-autotune"),
    "does not support an activation memory budget": lambda _: budget(),
    "outside of a compiled graph": lambda _: one()(torch.ones(2, 24)),
    "is not supported on a tensor that is sharded unevenly": lambda _: next(one().parameters()).detach().sort(),
    "the checkpoint has optimizer state": fresh_optimizer,
    "are not finite": lambda _: not_finite(),
    "is sharded and cannot be replaced": lambda _: replaced(),
    "its parameters are sharded, which Dynamo cannot trace": lambda _: step_compiled(),
    "what it does to one element depends on others": lambda _: mfsdp.fully_shard_optimizer(
        torch.optim.LBFGS(one().parameters())
    ),
    "no complete checkpoint of step": lambda folder: mfsdp.Checkpoints(folder).load(one(), step=3),
    "give it the compiled model": lambda _: mfsdp.together(one()),
    "a launcher has started": lambda _: launched(),
}
"""By a part of what is quoted."""


def budget() -> None:
    with functorch_config.patch(activation_memory_budget=0.5):
        called({})


def launched() -> None:
    with patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        one()


@pytest.mark.parametrize("part", PROVOKED)
def test_what_is_quoted_is_raised(part, tmp_path):
    """The whole quotation, holes and all, in what a user sees."""
    matching = [q for q in quotes() if part in q]
    assert len(matching) == 1, f"{part!r} is in {matching}"
    message = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            PROVOKED[part](tmp_path)
        except (Exception, CheckpointException) as error:
            message = f"{error} {error.__cause__}"
    message += " ".join(str(w.message) for w in warned)
    assert re.search(pattern(matching[0]), message, re.DOTALL), message
