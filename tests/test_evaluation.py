"""Evaluation and generation between training steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mfsdp
from tests.helpers.models import CASES, GPT, Block, llama
from tests.helpers.parity import averaged, batches, build, compiled, error, whole
from tests.helpers.ranks import collectives_told


class Gathers:
    """Counts all-gathers."""

    def __enter__(self) -> Gathers:
        self.count, self._told = 0, collectives_told(self._one)
        self._told.__enter__()
        return self

    def _one(self, kind: str, group: str) -> None:
        self.count += kind == "gather"

    def __exit__(self, *error: Any) -> None:
        self._told.__exit__(*error)


def generated(strategy: int) -> dict[str, Any]:
    """Tokens of transformers' ``generate`` on a sharded Llama and on the unsharded one; prompts differ by rank."""
    torch.manual_seed(0)
    reference = llama().eval()
    model = copy.deepcopy(reference)
    mfsdp.fully_shard(model, units=["LlamaDecoderLayer"], strategy=strategy)
    torch.manual_seed(dist.get_rank())
    prompt = torch.randint(67, (2, 4 + dist.get_rank()))
    arguments = {"max_new_tokens": 6 + 2 * dist.get_rank(), "do_sample": False, "use_cache": True, "pad_token_id": 0}
    want = reference.generate(prompt, **arguments)
    with Gathers() as seen, mfsdp.unsharded(model):
        on_entry = seen.count
        got = model.generate(prompt, **arguments)
    return {"equal": torch.equal(got, want), "tokens": got.shape[1], "entry": on_entry, "later": seen.count - on_entry}


@pytest.mark.dist
@pytest.mark.parametrize("strategy", [0, 1, 3])
def test_generate_gathers_once(two_ranks, strategy):
    for rank, seen in enumerate(two_ranks.run(generated, strategy, timeout=200)):
        gathers = {0: 0, 1: 3, 3: 3}[strategy]
        assert seen == {"equal": True, "tokens": 10 + 3 * rank, "entry": gathers, "later": 0}


def interrupted(lowering: str, strategy: int, evaluate: str) -> list[torch.Tensor]:
    """Trains four steps, with or without evaluation in between."""
    case = CASES["mlp" if lowering == "inductor" else "gpt"]
    _, model = build(case, strategy=strategy)
    run = compiled(model, lowering)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(4):
        if evaluate and step % 2:
            model.eval()
            with torch.no_grad():
                if evaluate == "unsharded":
                    with Gathers() as gathers, mfsdp.unsharded(model):
                        before = gathers.count
                        several = [run(batches(case, 50 + i)[dist.get_rank()]) for i in range(3)]
                    assert gathers.count == before
                    seen.append(several[0])
                seen.append(run(batches(case, 50)[dist.get_rank()]))
            model.train()
        case.loss(run, batches(case, step)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2], strict=False) if evaluate == "unsharded")
    return [whole(p).detach() for p in model.parameters()]


def unchanged(lowering: str, strategy: int) -> bool:
    """Evaluated unsharded, and sharded behind it."""
    plain = interrupted(lowering, strategy, "")
    torch._dynamo.reset()
    other = interrupted(lowering, strategy, "unsharded")
    return all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lowering", "strategy"),
    [
        ("eager", 0),
        ("none", 3),
        pytest.param("inductor", 3, marks=[pytest.mark.inductor, pytest.mark.exhaustive]),
        *(pytest.param("eager", strategy, marks=pytest.mark.exhaustive) for strategy in (1, 3)),
    ],
)
def test_training_goes_on_bitwise_after_evaluation(two_ranks, lowering, strategy):
    assert two_ranks.run(unchanged, lowering, strategy, timeout=300) == [True, True]


def graphs() -> list[int]:
    """How many graphs are compiled: training, evaluation, unsharded twice, evaluation again after a step."""
    case = CASES["mlp"]
    _, model = build(case)
    run = compiled(model, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts, before = [], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    x = batches(case)[dist.get_rank()]
    answers = []

    def seen() -> None:
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)

    for _ in range(2):
        case.loss(run, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen()
        with torch.no_grad():
            answers.append(run(x))
            seen()
            with mfsdp.unsharded(model):
                answers.append(run(x))
            seen()
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[2], answers[3])
    assert not torch.equal(answers[0], answers[2]), "the step is seen"
    return counts


@pytest.mark.dist
def test_unsharded_compiles_once_more_and_sees_each_step(two_ranks):
    assert two_ranks.run(graphs) == [[1, 2, 3, 3, 3, 3]] * 2


def trained_inside(lowering: str) -> float:
    case = CASES["gpt"]
    reference, model = build(case)
    run = compiled(model, lowering)
    x = batches(case)[dist.get_rank()]
    with mfsdp.unsharded(model):
        for _ in range(2):
            case.loss(run, x).backward()
            case.loss(reference, x).backward()
    averaged(reference)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.grad.full_tensor(), q.grad) for p, q in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("lowering", ["eager", "none"])
def test_backward_inside_of_unsharded_is_reduced(two_ranks, lowering):
    assert max(two_ranks.run(trained_inside, lowering)) < 1e-5


def test_unsharded_is_refused_inside_of_itself_and_without_shards():
    model = mfsdp.fully_shard(GPT(), units=[Block])
    with mfsdp.unsharded(model), pytest.raises(RuntimeError, match="unsharded already"), mfsdp.unsharded(model):
        pass
    with pytest.raises(ValueError, match="call mfsdp.fully_shard first"), mfsdp.unsharded(torch.nn.Linear(2, 2)):
        pass
    assert not any(m._mfsdp_unit.open or m._mfsdp_unit.full for m in model.modules() if hasattr(m, "_mfsdp_unit"))
