"""A restart runs neither passes nor a compiler, what was changed is compiled anew, and ranks need not agree on it."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import compile_cache
from mfsdp.config.options import Options
from mfsdp.runtime.desync import GroupState
from mfsdp.runtime.program_info import Outline, ProgramInfo
from tests.helpers.captured import captured
from tests.helpers.parity import whole
from tests.helpers.toys import offloaded


def start(folder: str, carried: bytes, changes: dict[str, Any]) -> dict[str, Any]:
    """A process's first two steps, with caches below a folder: what was found there, and what came out. ``carried``:
    what another process has saved of its caches.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    if carried:
        torch.compiler.load_cache_artifacts(carried)
    torch._dynamo.reset()
    counters.clear()
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("mfsdp")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))  # few kernels, which C++ takes long for
    model = mfsdp.fully_shard(nn.Sequential(*layers), units=["0", "1"], **changes.get("sharding", {}))
    run = torch.compile(model, backend="mfsdp", dynamic=False, options=changes.get("options", {}))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 16)
    said: list[str] = []
    before = GroupState.announce

    def announce(company: GroupState, words: Any, *more: Any) -> Any:
        said.extend(words.lines)
        return before(company, words, *more)

    GroupState.announce = announce  # type: ignore[method-assign]
    for _ in range(2):
        loss = run(x).square().mean()
        loss.backward()
    GroupState.announce = before  # type: ignore[method-assign]
    log.removeHandler(handler)
    with mfsdp.profile(run, steps=1) as seen:
        run(x).square().mean().backward()
        seen.step()
    found = dict(counters["aot_autograd"])
    grads = [whole(p.grad).double().sum().item() for p in model.parameters()]
    return {
        "hits": found.get("autograd_cache_hit", 0), "misses": found.get("autograd_cache_miss", 0),
        "loss": loss.item(), "grads": grads, "told": told, "said": said,
        "lines": [line.line.text for line in seen.lines],
        "saved": (torch.compiler.save_cache_artifacts() or [b""])[0],
    }  # fmt: skip


def folders(ranks: Any, each: list[str], carried: bytes = b"", **changes: Any) -> list[dict[str, Any]]:
    """Every rank has a folder of its own; what is carried is for rank 0."""
    return ranks.run(_in_its_own, each, carried, changes, timeout=300)


def _in_its_own(each: list[str], carried: bytes, changes: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    return start(each[rank], b"" if rank else carried, changes)


@pytest.mark.dist
@pytest.mark.inductor
def test_a_restart_is_warm_and_a_cold_rank_does_not_matter(two_fresh_ranks, tmp_path):
    """The second and third start are other processes; in the third both ranks have lost their caches, and one has what
    was saved.
    """
    each = [str(tmp_path / "rank0"), str(tmp_path / "rank1")]
    cold = folders(two_fresh_ranks, each)
    assert all((s["hits"], s["misses"]) == (0, 1) for s in cold)
    two_fresh_ranks.stop()
    warm = folders(two_fresh_ranks, each)
    assert all((s["hits"], s["misses"]) == (1, 0) for s in warm)
    assert any("forward of Sequential, from the cache" in line for line in warm[0]["told"])
    for a, b in zip(cold, warm):
        assert all(a[what] == b[what] for what in ("loss", "grads", "said", "lines")) and a["said"] and a["lines"]
    two_fresh_ranks.stop()
    for folder in each:
        shutil.rmtree(folder)
    half = folders(two_fresh_ranks, each, cold[0]["saved"])
    assert [s["hits"] for s in half] == [1, 0]
    assert [s["loss"] for s in half] == [s["loss"] for s in cold] and half[0]["grads"] == half[1]["grads"]


@pytest.mark.slow
def test_every_source_file_counts(tmp_path):
    """Also those that are reached through a link."""
    home = Path(compile_cache.__file__).parent.parent
    copied = tmp_path / "mfsdp"
    shutil.copytree(home, copied)
    before = compile_cache.sources(copied)
    assert before == compile_cache.sources(home)
    files = sorted(copied.rglob("*.py"))
    assert copied / "passes" / "gather.py" in files and len(files) > 100
    for path in files:
        text = path.read_text()
        path.write_text(f"{text}# 1\n")
        compile_cache.sources.cache_clear()
        assert compile_cache.sources(copied) != before, path
        path.write_text(text)


@pytest.mark.slow
def test_every_option_and_layout_counts():
    plain = captured(Options())
    assert plain == captured(Options()) and plain
    with offloaded("layers.0"):
        assert plain != captured(Options()), "what goes to the host"
    changed = {
        "prefetch": 2, "reduce_lag": 2, "max_unsharded": 5, "pool": False, "lowering": "whole", "check": False,
        "upto": "gather", "disable_symmetric_registration": True, "nccl_ub": True, "dump": "x", "frames": True,
        "keep_cast": False, "interleave": True, "max_activations": 5, "quantize": False, "split_backward": True,
        "check_finite": 3, "check_replicas": 3, "memory": 10**9, "cuda_graph": "programs",
    }  # fmt: skip
    assert set(changed) | set(compile_cache.OF_THE_RUN) == {f.name for f in fields(Options)}, (
        "add a new option to `changed`, with a value of its own, or to OF_THE_RUN in compiler/compile_cache.py"
    )
    keys = [captured(Options(**{name: value})) for name, value in changed.items()]
    keys += [captured(Options(), units=["1"]), captured(Options(), reshard_after_forward=False)]
    keys += [captured(Options(), mp_policy=mfsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))]
    assert len({plain, *keys}) == len(keys) + 1
    ours = pipeline.PIPELINE
    assert captured(Options(passes=ours[:-1])) not in ("", plain)
    assert captured(Options(passes=(*ours, ("mine", lambda program: None)))) == "", "what it does, no key can say"


def test_what_cannot_be_kept_is_compiled_anew():
    """Nothing of it reaches the user, and AOTAutograd is not told that there is a key."""
    made = compile_cache.CachedProgram(lambda args: args, ProgramInfo(Outline("toy", "forward", ())), "a program")
    made.keep()
    assert not hasattr(made, "_fx_graph_cache_key")
