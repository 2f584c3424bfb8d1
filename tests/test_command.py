"""The command line: explain, show, diff; and what a run leaves for other tools."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mfsdp
from mfsdp.cli import main as command
from mfsdp.config import best_effort
from mfsdp.cost_model import machine
from tests.helpers.machines import quick
from tests.helpers.models import llama

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


def factory() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.empty(8, 64),)


def alone() -> nn.Module:
    return nn.Embedding(50, 8)


def needy(width: int) -> nn.Module:
    return nn.Linear(width, width)


def wrong() -> dict[str, int]:
    return {}


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert command.main(args) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_explain_a_function(capsys, tmp_path):
    names = ["--units", "Linear", "--world", "4"]
    text = shown(capsys, "explain", "tests.test_command:factory", *names)
    assert "Sequential on 4 ranks" in text and "fits in" in text and "all_gather" not in text
    html, trace = tmp_path / "a.html", tmp_path / "a.json"
    text = shown(capsys, "explain", "tests.test_command:factory", *names, "--listing", "--trace", str(trace))
    assert "= all_gather" in text and "bf16[" in text
    assert json.loads(trace.read_text())["traceEvents"]
    shown(capsys, "explain", "tests.test_command:factory", *names, "--html", str(html))
    assert html.read_text().lstrip().lower().startswith("<!doctype html")
    assert "tokens/s" in shown(capsys, "explain", "tests.test_command:alone", "--batch", "2", "--length", "16")


def test_measure_kernels_and_explain_with_them(capsys, monkeypatch, tmp_path):
    quick(monkeypatch)
    best = machine._best
    monkeypatch.setattr(machine, "_best", lambda function: best(function, 1))
    target, file = "tests.test_command:factory", str(tmp_path / "kernels.json")
    assert "new kernels on" in shown(capsys, "measure", file, "--kernels", target, "--compute-dtype", "none")
    assert shown(capsys, "measure", file, "--kernels", target, "--compute-dtype", "none").startswith("0 new kernels")
    given = ["explain", target, "--compute-dtype", "none", "--kernels", file]
    assert "Sequential on 8 ranks" in shown(capsys, *given)
    found = str(tmp_path / "this.json")
    assert found in shown(capsys, "measure", found)
    assert "this machine" in shown(capsys, "explain", target, "--hardware", found)


def test_explain_a_table(capsys, tmp_path):
    args = [
        "--world",
        "4,8",
        "--prefetch",
        "0,1",
        "--strategy",
        "3",
        "--units",
        "0+2,Linear",
        "--compute-dtype",
        "none",
    ]
    text = shown(capsys, "explain", "tests.test_command:factory", *args, "--plot", str(tmp_path / "a.png"))
    assert text.splitlines()[0].split()[:3] == ["world", "prefetch", "units"] and len(text.splitlines()) == 9
    assert (tmp_path / "a.png").exists()


def config_of(kind: str) -> Any:
    """Small configurations, as transformers saves them with the models' own classes."""
    t, small = transformers, {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    configs = {
        "bert": lambda: t.BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"], **small),
        "vit": lambda: t.ViTConfig(
            num_hidden_layers=1, image_size=32, patch_size=8, architectures=["ViTForImageClassification"], **small
        ),
        "t5": lambda: t.T5Config(
            num_layers=1, d_model=64, d_ff=128, num_heads=4, d_kv=16, decoder_start_token_id=0,
            architectures=["T5ForConditionalGeneration"],
        ),
    }  # fmt: skip
    return configs[kind]()


@pytest.mark.parametrize(
    "kind", ["vit", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("bert", "t5"))]
)
def test_explain_what_transformers_ships(capsys, tmp_path, kind):
    """Language models that log while they are traced, encoders, images, encoders and decoders."""
    config_of(kind).save_pretrained(tmp_path)
    where = tmp_path / "config.json" if kind == "vit" else tmp_path
    text = shown(capsys, "explain", str(where), "--world", "4", "--length", "32", "--batch", "2")
    assert "on 4 ranks" in text and "fits in" in text


def test_a_configuration_that_is_not_enough(capsys, tmp_path):
    transformers.WhisperConfig(architectures=["WhisperForConditionalGeneration"]).save_pretrained(tmp_path)
    assert command.main(["explain", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "its input is called input_features" in told and "Give package.module:factory instead" in told


def test_explain_a_hugging_face_configuration(capsys, tmp_path):
    llama().config.save_pretrained(tmp_path)
    text = shown(capsys, "explain", str(tmp_path), "--mesh-shape", "2x4", "--length", "16", "--listing")
    assert "LlamaForCausalLM on 8 ranks [2, 4]" in text and "model.layers.0" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["explain", "nothing"], "give package.module:factory"),
        (["explain", "tests.test_command:nothing"], "has no function 'nothing'"),
        (["explain", "no.such.module:f"], "No module named 'no'"),
        (["explain", "nothing.json"], "there is no file nothing.json"),
        (["explain", "pyproject.toml:f"], "No module named 'pyproject'"),
        (["explain", "tests.test_command:factory", "--world", "many"], "many: give whole numbers"),
        (["explain", "tests.test_command:factory", "--hardware", "abacus"], "neither a file nor one of"),
        (["explain", "tests.test_command:factory", "--units", "Conv2d"], "'Conv2d' matches no module"),
        (["explain", "tests.test_command:factory", "--reshard-after-forward", "perhaps"], "write true or false"),
        (["explain", "tests.test_command:factory", "--world", "2,4", "--html", "a.html"], "are of one step"),
        (["explain", "tests.test_command:factory", "--plot", "a.png"], "--plot draws several"),
        (["explain", "tests.test_command:needy"], "cannot be called without arguments"),
        (["explain", "tests.test_command:factory", "--world", "abc"], "--world abc: give whole numbers"),
        (["explain", "nothing:here", "--html", "no/such/a.html"], "--html no/such/a.html: there is no folder no/such"),
        (["explain", "nothing:here", "--trace", "docs"], "--trace docs: is a folder"),
        (
            ["plan", "nothing:here", "--memory", "70"],
            "70 bytes hold no step of any model; did you mean 70GB?",
        ),
        (["plan", "nothing:here", "--memory", "70GB", "--save", "no/plan.json"], "there is no folder no"),
        (["explain", "tests.test_command:wrong"], "gives a dict: return a model, or"),
        (["show", "nowhere"], "there is no folder nowhere; MFSDP_DUMP=nowhere"),
        (["show", "docs"], "docs holds no listings"),
        (["diff", "docs", "README.md"], "give two files or two folders"),
        (["diff", "README.md", "nowhere"], "there is no file nowhere"),
    ],
)
def test_what_cannot_be_is_a_line(capsys, monkeypatch, args, message):
    monkeypatch.chdir(ROOT)
    assert command.main(args) == 1
    err = capsys.readouterr().err
    assert err.startswith("mfsdp: ") and message in err


def test_long_work_says_what_it_has_come_to(capsys, monkeypatch):
    monkeypatch.setattr("mfsdp.cli.main.EVERY", 0.0)
    monkeypatch.chdir(ROOT)
    assert command.main(["explain", "tests.test_command:factory", "--world", "2", "--compute-dtype", "none"]) == 0
    err = capsys.readouterr().err
    assert re.search(r"^mfsdp: \d+ s, tracing Sequential$", err, re.M) and "running the passes" in err
    assert command.main(["plan", "tests.test_command:factory", "--memory", "1GB", "--compute-dtype", "none"]) == 0
    assert re.search(r"planning: \d+ settings estimated, \d+ simulated", capsys.readouterr().err)
    with best_effort.listening(lambda what: 1 / 0):
        best_effort.doing("something")  # what only tells ends nothing
    assert not best_effort._listeners


def dump(folder: Path, prefetch: int) -> None:
    torch._dynamo.reset()
    model = mfsdp.fully_shard(factory()[0], units=[nn.Linear])
    options = {"lowering": "eager", "dump": str(folder), "prefetch": prefetch}
    torch.compile(model, backend="mfsdp", options=options)(torch.ones(8, 64)).sum().backward()


def test_diff_is_of_what_is_done(capsys, tmp_path):
    """Lanes and memory follow from everything before; a line that only they change on is told with ``--live``."""
    head = "; C G R value               op                  type      delta   live"
    rows = ["<-o {r}                           wait u0_full                  .  {live}",
            "* | {r}  addmm                  = addmm x, y        f32[4]    +4K  {live}"]  # fmt: skip
    for name, r, live in (("a", ".", "4K"), ("b", "|", "8K")):
        (tmp_path / name).write_text("\n".join([head, *(row.format(r=r, live=live) for row in rows)]))
    files = [str(tmp_path / name) for name in "ab"]
    assert shown(capsys, "diff", *files) == ""
    assert "+<-o |" in shown(capsys, "diff", "--live", *files)
    (tmp_path / "b").write_text((tmp_path / "b").read_text().replace("x, y", "y, x"))
    text = shown(capsys, "diff", *files)
    assert text.count("\n-") == text.count("\n+") - 1 == 1 and "+* | |  addmm" in text
    for name in "ab":
        (tmp_path / name).write_text(f"; peak {name}\n; the same")
    assert shown(capsys, "diff", *files).splitlines()[2:] == ["-; peak a", "+; peak b"]


def test_show_and_diff(capsys, tmp_path, monkeypatch):
    dump(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    last = next((tmp_path / "b").glob("*.backward.*.assign_groups.txt"))
    last.write_text(last.read_text().replace("free", "forget", 1) + "; one more line\n")
    text = shown(capsys, "show", str(tmp_path / "a"))
    assert text.count("; mfsdp  Sequential  assign_groups") == 2 and "\x1b" not in text
    text = shown(capsys, "show", str(tmp_path / "a"), "--phase", "forward", "--stage", "all")
    assert text.count("; mfsdp  Sequential") == 1 + len(mfsdp.pipeline.PIPELINE) and "backward" not in text
    assert shown(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "a")) == ""
    text = shown(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert "+; one more line" in text and text.count("@@") >= 2 and "forward" not in text
    files = [next((tmp_path / "a").glob(f"*.forward.{stage}.txt")) for stage in ("0.capture", "4.gather")]
    assert shown(capsys, "diff", *map(str, files)).startswith("---")
    (tmp_path / "b" / last.name).rename(tmp_path / "b" / f"graph999.{last.name.partition('.')[2]}")
    assert "only in " in shown(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[2m; mfsdp" in shown(capsys, "show", str(tmp_path / "a"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(capsys, "show", str(tmp_path / "a"))
    assert command.main(["show", str(tmp_path / "a"), "--stage", "nothing"]) == 1
    assert "no listing after nothing in" in capsys.readouterr().err


def test_artifacts_and_logs_for_torchs_own_tools(tmp_path):
    code = "from tests.test_command import dump; from pathlib import Path; dump(Path({!r}), 1)".format(
        str(tmp_path / "d")
    )
    env = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "TORCH_LOGS": "+mfsdp"}
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    traces = "".join(p.read_text() for p in (tmp_path / "trace").iterdir())
    assert "mfsdp_graph0_forward_0_capture" in traces and "; mfsdp  Sequential  assign_groups  backward" in traces
    assert "graph0 backward assign_groups" in out.stderr and "graph0 forward: Sequential, Schedule(" in out.stderr


def test_the_version(capsys):
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert capsys.readouterr().out.strip() == importlib.metadata.version("mfsdp")
