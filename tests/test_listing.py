"""Golden listings, whole; `make goldens` accepts new ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mfsdp
from mfsdp import pipeline
from mfsdp.ir import byte_costs, printer
from tests.helpers.models import GPT, Block
from tests.helpers.toys import toy2


@pytest.mark.parametrize("phase", ["forward", "backward", "inference"])
def test_toy_after_each_pass(golden, phase):
    stages = pipeline.run(toy2(phase))
    assert [s.name for s in stages] == ["capture", *(name for name, _ in pipeline.PIPELINE)]
    for stage in stages:
        golden(f"toy2.{phase}.{stage.name}", stage.listing)


def test_mixed_precision(golden):
    """bf16 travels and computes, fp32 is kept and reduced: one cast per unit, on the shard."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x = torch.empty(8, 64, dtype=torch.bfloat16)
    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    programs = mfsdp.trace(model, (x,), world=4, units=["0", "2"], mp_policy=policy, name="mixed")
    for program in programs:
        golden(f"mixed.{program.phase}", pipeline.run(program)[-1].listing)


def test_narrow_gradients(golden):
    """Gradients travel in bf16 and are added up in fp32; whole ones wait between synchronisations."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.empty(8, 64)
    policy = mfsdp.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16, param_comm_dtype=torch.bfloat16)
    _, backward = mfsdp.trace(model, (x,), world=4, strategy=1, units=["0", "2"], mp_policy=policy, name="narrow")
    golden("narrow.backward", pipeline.run(backward)[-1].listing)


STRATEGIES = {
    "no_shard": {"strategy": 0},
    "optim": {"strategy": 1},
    "optim_grads": {"strategy": 2},
    "hsdp": {"mesh_shape": (2, 4)},
    "hfsdp": {"mesh_shape": (2, 4), "outer_strategy": "optim"},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(golden, name):
    for phase in ("forward", "backward"):
        golden(f"{name}.{phase}", pipeline.run(toy2(phase, **STRATEGIES[name]))[-1].listing)


def test_kept_parameters(golden):
    for phase in ("forward", "backward"):
        golden(f"kept.{phase}", pipeline.run(toy2(phase, reshard_after_forward=False))[-1].listing)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions of torch number views otherwise")
def test_gpt(golden):
    """Tied embeddings, attention, several parameters per unit, one unit like the other."""
    with torch.device("meta"):
        model, ids = GPT(width=32, layers=3), torch.empty(2, 8, dtype=torch.long)
    for program in mfsdp.trace(model, (ids,), world=4, units=[Block], name="gpt"):
        golden(f"gpt.{program.phase}", pipeline.run(program)[-1].listing)


def test_one_process_gathers_nothing(golden):
    with torch.device("meta"):
        model, x = nn.Linear(16, 16), torch.empty(4, 16)
    for program in mfsdp.trace(model, (x,), world=1, name="alone"):
        golden(f"alone.{program.phase}", pipeline.run(program)[-1].listing)


def test_the_text_is_the_same_every_time():
    first, second = ([s.listing for s in pipeline.run(toy2("backward"))] for _ in range(2))
    assert first == second
    assert all(text.isascii() for text in first)


def test_unfolded_shows_every_unit():
    program = toy2()
    assert "like u0" in printer.render(program, "capture")
    assert "like u0" not in printer.render(program, "capture", fold=False)


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0B"), (512, "512B"), (264192, "258K"), (2113536, "2.02M"), (3 * 2**29, "1.50G")]
)
def test_sizes(n, text):
    assert byte_costs.size(n) == text
