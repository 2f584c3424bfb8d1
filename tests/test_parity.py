"""Sharded equals unsharded: losses, gradients, ten optimizer steps, different data on each rank (invariant 29)."""

from __future__ import annotations

import pytest

from mfsdp import pipeline
from tests.helpers.models import CASES
from tests.helpers.parity import gradients, training

pytestmark = pytest.mark.dist

COMPILED = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in ("llama", "gpt_checkpointed") else name
    for name, case in CASES.items()
    if not case.traced or name == "llama"
]
"""Those of Hugging Face train compiled in `test_clients.py`, and Llama in `test_accelerate.py`."""


@pytest.mark.parametrize("name", COMPILED)
def test_two_ranks_eager_lowering_is_bitwise(two_ranks, name):
    bound = 1e-6 if name == "normed" else 0  # the same sums over uses of a weight, in another order
    for worst in two_ranks.run(gradients, name, "eager"):
        assert worst["loss"] == 0 and worst["average"] <= bound
        assert worst["joined"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_uncompiled(two_ranks, name):
    # A unit that is called twice is gathered and reduced twice here: the same sum in another order.
    bound = 1e-6 if name in ("twice", "normed") else 0
    for worst in two_ranks.run(gradients, name, "none"):
        assert worst["loss"] == 0 and worst["average"] <= bound
        assert worst["joined"] < 1e-5


@pytest.mark.parametrize("name", ["mlp", "unused"])
def test_four_ranks(four_ranks, name):
    for worst in four_ranks.run(gradients, name, "eager"):
        assert max(worst.values()) < 1e-5


@pytest.mark.inductor
@pytest.mark.parametrize(
    "name", ["unused", "lora", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("gpt_checkpointed", "conv"))]
)
def test_two_ranks_inductor(two_ranks, name):
    for worst in two_ranks.run(gradients, name, "inductor", timeout=300):
        assert max(worst.values()) < 1e-5


@pytest.mark.parametrize("name", ["mlp", "unused", "lora"])
def test_ten_adamw_steps_with_clipping(two_ranks, name):
    assert max(two_ranks.run(training, name, "eager")) < 1e-5


# All of it is what runs above.
@pytest.mark.parametrize(
    "upto",
    [
        name if name in ("capture", "gather", "reduce", "defer", "plan_memory")
        else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("capture", *(name for name, _ in pipeline.PIPELINE[:-1]))
    ],
)  # fmt: skip
def test_every_prefix_of_the_pipeline_gives_the_same_numbers(two_ranks, upto):
    for worst in two_ranks.run(gradients, "mlp", "eager", upto=upto):
        assert worst["loss"] == 0 and worst["average"] == 0


@pytest.mark.parametrize(
    ("upto", "bound"), [("reshard", 1e-6), pytest.param("inplace_wgrad", 0, marks=pytest.mark.exhaustive)]
)
def test_prefixes_of_the_pipeline_with_a_tied_weight(two_ranks, upto, bound):
    """Before `reduce`, each use is reduced by itself: the same sum in another order."""
    for worst in two_ranks.run(gradients, "gpt", "eager", upto=upto):
        assert worst["loss"] == 0 and worst["average"] <= bound


def test_kept_parameters(two_ranks):
    for worst in two_ranks.run(gradients, "gpt", "eager", {"reshard_after_forward": False}):
        assert worst["loss"] == 0 and worst["average"] == 0
    for worst in two_ranks.run(gradients, "gpt", "none", {"reshard_after_forward": False}):
        assert worst["loss"] == 0 and worst["average"] == 0
