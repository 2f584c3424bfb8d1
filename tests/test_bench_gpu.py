"""The benchmark of one GPU, on the CPU: its table, its options, rows that fail, and that all train the same model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.bench import gpu, gpu_row

FSDP2 = {"ms": 160.5, "host_ms": 98.0, "first_s": 16.0, "losses": [12.0, 8.0], "flop": 61.37e12, "tokens": 8192,
         "peak": int(27.7 * 2**30), "reserved": int(32.5 * 2**30), "breaks": []}  # fmt: skip
PLACE = {"model": "llama-1b", "world": 1, "fake": False, "batch": 2, "seq": 4096, "round": 0}


def record(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    about = dict.fromkeys(("torch", "transformers", "megatron-fsdp", "nccl", "python", "commit", "day"), "1.0")
    return {"about": {"device": "H100", **about}, "peak_flops": 989e12, "rows": [{**PLACE, **r} for r in rows],
            "left_out": [], **more}  # fmt: skip


def cells(text: str, name: str) -> dict[str, str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return dict(zip(gpu.HEAD, (c.strip() for c in row.strip("|").split("|")), strict=True))


def test_the_table_of_a_record():
    explained = {"mfsdp": {"ms": 170.0, "peak": 30 * 2**30}}
    mfsdp = {**FSDP2, "contender": "mfsdp", "ms": 150.0, "losses": [12.0, 8.08], "breaks": ["print", "item"]}
    text = gpu.table(
        record(
            {**FSDP2, "contender": "plain", "ms": 186.4}, {**FSDP2, "contender": "fsdp2-layers"}, mfsdp,
            {"contender": "megatron-v1", "failed": "a | b"}, {"contender": "explain", "explained": explained},
            left_out=["llama-1b-1-megatron-v2-0"],
        )
    )  # fmt: skip
    assert "## llama-1b, one process, 2 x 4096 tokens" in text
    seen = cells(text, "fsdp2-layers")
    assert (seen["ms"], seen["tokens/s"], seen["/ FSDP2"], seen["MFU"]) == ("160.5", "51,040", "1.00", "0.387")
    assert (seen["host ms"], seen["first s"], seen["peak GiB"], seen["reserved"]) == ("98.0", "16", "27.70", "32.50")
    assert seen["loss"] == "8.0000 (+0.00%)" and seen["explain ms"] == "-"
    ours = cells(text, "mfsdp")
    assert ours["/ FSDP2"] == "1.07" and ours["loss"] == "8.0800 (+1.00%)"
    assert ours["explain ms"] == "170.0 (+13%)" and ours["explain GiB"] == "30.00 (+8%)"
    assert cells(text, "plain")["loss"] == "8.0000" and cells(text, "megatron-v1")["ms"] == "a / b"
    assert (
        "mfsdp: the graph is broken, the rest ran uncompiled: print; item" in text
        and "the time was up: llama-1b-1-megatron-v2-0." in text
    )
    assert "| explain |" not in text, "it is in the rows of others"


def test_rounds_are_medians_and_a_round_that_failed_is_none():
    rows = [{**FSDP2, "contender": "mfsdp", "ms": ms, "round": i} for i, ms in enumerate((150.0, 170.0, 151.0))]
    failed = {"contender": "mfsdp", "failed": "out of memory"}
    assert cells(gpu.table(record(failed, *rows)), "mfsdp")["ms"] == "151.0"


def test_another_rank_alone_has_no_loss_and_its_peak_may_be_unknown():
    row = {k: v for k, v in FSDP2.items() if k not in ("peak", "reserved")}
    text = gpu.table(record({**row, "contender": "mfsdp", "world": 8, "fake": True}, peak_flops=None))
    seen = cells(text, "mfsdp")
    assert "one rank of 8, others fake" in text
    assert [seen[k] for k in ("loss", "MFU", "peak GiB", "/ FSDP2")] == ["-"] * 4


def test_options():
    args = gpu.arguments([])
    assert (
        args.models == ["llama-1b"]
        and args.world == [(1, False)]
        and set(args.contenders) == {*gpu_row.CONTENDERS, "explain"}
    )
    given = ["--models", "gpt2,mixture", "--world", "1,1of8,2", "--options", '{"prefetch": 2}']
    args = gpu.arguments(given)
    assert args.models == ["gpt2", "mixture"] and args.world == [(1, False), (8, True), (2, False)]
    assert args.options == {"prefetch": 2}
    for wrong in (["--models", "bert"], ["--models", ""], ["--world", "two"], ["--world", "0"]):
        with pytest.raises(SystemExit):
            gpu.arguments(wrong)
    with pytest.raises(argparse.ArgumentTypeError, match="bert: choose from llama-1b"):
        gpu.listed(["llama-1b"])("bert")


def test_two_ranks_on_one_gpu_are_hosts_of_their_own():
    def told(rank: int, ranks: int, fake: bool, gpus: int) -> dict[str, str]:
        return gpu.environment(rank, ranks, fake, 29500, gpus, Path("cache"))

    shared = told(1, 2, False, 1)
    assert (shared["LOCAL_RANK"], shared["NCCL_HOSTID"], shared["NCCL_MULTI_RANK_GPU_ENABLE"]) == ("0", "host1", "1")
    apart, cpu, fake = told(1, 2, False, 2), told(1, 2, False, 0), told(0, 8, True, 1)
    assert apart["LOCAL_RANK"] == "1" and "NCCL_HOSTID" not in {**apart, **cpu, **fake}
    assert "WORLD_SIZE" not in fake and cpu["WORLD_SIZE"] == "2"


def test_why_a_row_failed():
    assert gpu.reason("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried", 1, 9) == "out of memory"
    log = "Traceback\nValueError: one\nduring which\n[rank1]: torch._dynamo.exc.Unsupported: two\n  File"
    assert gpu.reason(log, 1, 9) == "torch._dynamo.exc.Unsupported: two"
    assert gpu.reason("", -9, 9) == "ended by SIGKILL" and gpu.reason("", 3, 9) == "exit status 3"
    assert gpu.reason("W some warning", None, 9) == "took more than 9 s"


PROGRAM = """
import json, os, sys, time
spec = json.loads(sys.argv[1])
kind, rank = spec["contender"], os.environ.get("RANK")
if kind == "mfsdp" and rank == "1":
    raise ValueError("of one rank")
if kind in ("mfsdp", "fsdp2-whole"):
    time.sleep(60)
if kind == "megatron-v1":
    os.kill(os.getpid(), 11)
if rank in (None, "0"):
    open(spec["result"], "w").write(json.dumps({**FIGURES, "seen": [rank, spec["world"], spec["seq"]]}))
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A program that stands for gpu_row.py: contenders that work, crash, hang."""
    path = tmp_path / "row.py"
    path.write_text(PROGRAM.replace("FIGURES", repr(FSDP2)))
    monkeypatch.setattr(gpu, "ROW", path)
    return tmp_path / "out"


def raced(out: Path, *given: str) -> dict[str, Any]:
    args = gpu.arguments(["--out", str(out), *given])
    out.mkdir(exist_ok=True)
    return gpu.race(args)


@pytest.mark.slow
def test_a_row_that_fails_does_not_end_the_race(stand_in):
    found = raced(
        stand_in, "--contenders", "plain,mfsdp,megatron-v1,fsdp2-whole,fsdp2-layers", "--world", "2", "--limit", "4",
        "--tiny",
    )  # fmt: skip
    rows = {r["contender"]: r for r in found["rows"]}
    assert rows["mfsdp"]["failed"] == "ValueError: of one rank", "the other one waits in vain"
    assert rows["megatron-v1"]["failed"] == "ended by SIGSEGV"
    assert rows["fsdp2-whole"]["failed"] == "took more than 4 s"
    assert rows["plain"]["seen"] == ["0", 1, 64], "it is one process"
    assert rows["fsdp2-layers"]["seen"] == ["0", 2, 64] and rows["fsdp2-layers"]["batch"] == 2
    kept = json.loads((stand_in / "record.json").read_text())
    assert kept["rows"] == found["rows"] and kept["about"]["torch"] and kept["options"]["limit"] == 4
    assert "| ended by SIGSEGV |" in (stand_in / "table.md").read_text()


def test_when_the_time_is_up_no_row_starts(stand_in):
    found = raced(stand_in, "--contenders", "plain,fsdp2-layers", "--minutes", "0", "--rounds", "2")
    names = ["plain-0", "fsdp2-layers-0", "plain-1", "fsdp2-layers-1"]
    assert found["rows"] == [] and found["left_out"] == [f"llama-1b-1-{n}" for n in names]


def test_rounds_take_turns_and_plain_is_run_in_the_first_setting_alone(stand_in):
    found = raced(stand_in, "--contenders", "plain,fsdp2-layers,explain", "--world", "1of8,1", "--rounds", "2")
    assert [(r["contender"], r["world"], r["round"]) for r in found["rows"]] == [
        ("plain", 8, 0), ("fsdp2-layers", 8, 0), ("explain", 8, 0), ("plain", 8, 1), ("fsdp2-layers", 8, 1),
        ("fsdp2-layers", 1, 0), ("explain", 1, 0), ("fsdp2-layers", 1, 1),
    ]  # fmt: skip


# What a row does


def row(contender: str = "mfsdp", model: str = "llama-1b", **more: Any) -> gpu_row.Row:
    given = {"world": 1, "fake": False, "batch": 2, "seq": 16, "layers": 0, "tiny": True, "steps": 2, "warmup": 1,
             "lowering": "eager", "options": {}, "hardware": "h100", "kernels": 0, "result": ""}  # fmt: skip
    return gpu_row.Row(contender, model, **{**given, **more})


SIZES = {"llama-1b": 1.236e9, "llama-8b": 1.923e9, "qwen3-0.6b": 0.596e9, "gpt2": 0.1244e9, "mixture": 0.78e9}


@pytest.mark.slow
@pytest.mark.parametrize("model", gpu_row.MODELS)
def test_models_are_those_of_their_names(model):
    pytest.importorskip("transformers")
    whole = gpu_row.build(row(model=model, tiny=False), "meta")
    assert sum(p.numel() for p in whole.parameters()) == pytest.approx(SIZES[model], rel=0.02)
    assert len(whole.get_submodule(gpu_row.MODELS[model].blocks)) == whole.config.num_hidden_layers
    small = gpu_row.build(row(model=model, layers=3), "meta")
    assert small.config.num_hidden_layers == 3 and sum(p.numel() for p in small.parameters()) < 1e6


def test_operations_of_a_step():
    """Llama-3.2-1B by hand, as on 2026-11-26; of eight experts two work for a token."""
    pytest.importorskip("transformers")
    model = gpu_row.build(row(tiny=False), "meta")
    parameters = sum(p.numel() for p in model.parameters())
    want = 8192 * (6 * parameters + 12 * 16 * 2048 * 4096 / 2)
    assert gpu_row.operations(model, 2, 4096) == want == pytest.approx(67.35e12, rel=0.01)
    experts = gpu_row.build(row(model="mixture", tiny=False), "meta")
    stacked = sum(p.numel() for p in experts.parameters() if p.dim() == 3)
    rest = sum(p.numel() for p in experts.parameters()) - stacked - 32000 * 1024
    assert gpu_row.operations(experts, 1, 64) == 64 * (6 * (rest + stacked / 4) + 12 * 8 * 1024 * 64 / 2)


def trained(contender: str, model: str = "llama-1b") -> dict[str, Any]:
    spec = row(contender, model, world=dist.get_world_size(), layers=1)
    torch.manual_seed(0)
    ids = torch.randint(256, (spec.batch, spec.seq), generator=torch.Generator().manual_seed(1))
    found = gpu_row.measured(gpu_row.Setting(spec, gpu_row.build(spec, "cpu"), ids, "cpu"))
    return {**found, "spec": asdict(spec)}


@pytest.mark.exhaustive
@pytest.mark.dist
@pytest.mark.slow
def test_all_train_the_same_model(two_ranks):
    """On two ranks, from the same weights, on the same tokens: only bf16 rounds in different places."""
    pytest.importorskip("transformers")
    plain = two_ranks.run(trained, "plain", timeout=300)[0]["losses"]
    assert plain[0] - plain[1] > 1e-3, "it trains"
    for contender in ("fsdp2-layers", "mfsdp-optimizer"):
        for found in two_ranks.run(trained, contender, timeout=300):
            assert found["losses"] == pytest.approx(plain, rel=1e-3), contender
            assert found["ms"] > 0 and len(found["all_ms"]) == 2 and 0 < found["host_ms"] <= max(found["all_ms"])
            assert contender != "mfsdp-optimizer" or found["breaks"] == []
    assert two_ranks.run(trained, "mfsdp", "gpt2", timeout=300)[0]["breaks"] == [], "loss included"


@pytest.mark.slow
@pytest.mark.dist
def test_the_whole_of_it(tmp_path):
    """A contender that runs in a process of its own."""
    pytest.importorskip("transformers")
    found = raced(tmp_path, "--contenders", "mfsdp", "--tiny", "--lowering", "eager", "--seq", "16",
                  "--layers", "1", "--steps", "1", "--warmup", "0")  # fmt: skip
    (mfsdp,) = found["rows"]
    assert mfsdp["losses"][1] > 0, mfsdp
    assert sys.executable and (tmp_path / "rows" / "llama-1b-1-mfsdp-0.0.log").exists()


@pytest.mark.slow
def test_what_explain_tells():
    pytest.importorskip("transformers")
    told = gpu_row.explained(row("explain", model="gpt2", world=8, layers=1))["explained"]
    assert set(told) == {"mfsdp", "mfsdp-optimizer"} and all(t["ms"] > 0 and t["peak"] > 0 for t in told.values())
