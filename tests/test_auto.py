"""What is decided by itself: how far ahead gathers are launched, and which modules become units."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import mfsdp
from mfsdp import pipeline
from mfsdp.config.hardware import KNOWN, Hardware, Link
from mfsdp.config.options import Options
from mfsdp.cost_model import auto_prefetch, machine, op_cost
from mfsdp.cost_model.auto_prefetch import DEPTHS, WITHIN, AutoPrefetch
from mfsdp.cost_model.timeline import simulate
from mfsdp.dtensor.mesh import local_mesh
from mfsdp.sharding import auto_wrap
from tests.helpers.models import Block, llama, peft
from tests.helpers.parity import whole

AUTO = {"prefetch": "auto"}
SLOW = Hardware("slow", {"f32": 1e12}, 10**12, 1e12, Link(2e9, 1e-6), Link(2e9, 1e-6), kernel=1e-7)
"""Hardware on which gathers of units of different sizes take longer than the unit before computes."""


class Uneven(nn.Module):
    """Small units between large ones: what is one unit ahead of a large one computes too little to hide it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [512, 512, 16, 16, 16, 512, 512]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def programs(model: nn.Module | None = None, **sharding: Any) -> mfsdp.compiler.tracing.Programs:
    with torch.device("meta"):
        return mfsdp.trace(
            model or Uneven(), (torch.empty(512, 512),), **{"world": 4, "units": [nn.Linear], **sharding}
        )


def seconds(program: Any, machine: Hardware, ahead: int, **knobs: Any) -> float:
    """What the clock says of a whole pipeline with a fixed depth."""
    twin = program.copy()
    pipeline.run(twin, passes=pipeline.table(ahead, **knobs), listings=False)
    return max(s.end for s in simulate(twin, op_cost.op_times(twin, machine)))


def told(program: Any, auto: AutoPrefetch, **knobs: Any) -> tuple[str, list[str]]:
    """The pass's note, and the names of lines after it."""
    twin = program.copy()
    stages = pipeline.run(twin, passes=pipeline.table(auto, **knobs), upto="prefetch")
    return stages["prefetch"].listing.splitlines()[1], [n.name for n in twin.nodes]


# prefetch="auto"


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "limit"), [(1, None), (0, 1040 << 10)])
def test_the_depth_is_the_smallest_that_is_as_good_as_the_best(limit, lag):
    """The clock is that of programs that have gone through all passes."""
    options = Options(prefetch="auto", reduce_lag=lag, max_unsharded=limit)
    auto, chosen = AutoPrefetch(SLOW, options), {}
    for program in programs():
        found = {d: seconds(program, SLOW, d, reduce_lag=lag, max_unsharded=limit) for d in DEPTHS}
        before = program.copy()
        pipeline.run(before, upto="reduce", listings=False)
        names = [n.name for n in before.nodes]
        tried = auto_prefetch._Tried(before, auto, SLOW)
        assert {d: tried.seconds(d) for d in reversed(DEPTHS)} == found, "the same program, not nearly the same"
        right = next(d for d in DEPTHS if found[d] <= min(found.values()) * (1 + WITHIN))
        assert auto(before)[0] == right and [n.name for n in before.nodes] == names, "looking changes nothing"
        line, order = told(program, auto, reduce_lag=lag, max_unsharded=limit)
        fixed = program.copy()
        pipeline.run(
            fixed, passes=pipeline.table(right, reduce_lag=lag, max_unsharded=limit), upto="prefetch", listings=False
        )
        assert order == [n.name for n in fixed.nodes]
        assert f"auto: depth {right} of 0 to 4: {1e3 * found[right]:.2f} ms on slow against " in line, line
        assert all(f"{d}: {1e3 * found[d]:.2f}" in line for d in DEPTHS if d != right)
        assert limit is None or "held back by the limit of 1.02M" in line or right == 0
        chosen[program.phase] = right
    assert limit is not None or chosen["forward"] > 1, "a model on which the default is not the best"


@pytest.mark.slow
def test_each_program_for_itself_and_within_memory():
    """Where the depth that is fastest does not fit, a smaller one is taken; where none does, none."""
    forward = programs().forward
    pipeline.run(forward, upto="reduce", listings=False)
    free = AutoPrefetch(SLOW)(forward)[0]
    taken = {}
    for room in range(0, 8 << 20, 1 << 18):
        taken[room], words = AutoPrefetch(replace(SLOW, memory=10 << 30), held=(10 << 30) - room)(forward)
        assert taken[room] == free or "does not fit" in words
    assert min(taken.values()) == 0 and max(taken.values()) == free and taken[0] == 0
    assert list(taken.values()) == sorted(taken.values()), "more room, no smaller depth"


@pytest.mark.slow
def test_explain_decides_with_its_hardware_and_suggests_nothing_that_is_decided():
    given: dict[str, Any] = {"world": 4, "units": [nn.Linear], "hardware": SLOW}
    with torch.device("meta"):
        model, x = Uneven(), torch.empty(512, 512)
    table = mfsdp.compare(model, (x,), options={"prefetch": [*DEPTHS, "auto"]}, **given)
    *fixed, auto = table.reports
    parts = [[v.lines[-1].end for v in r.views] for r in fixed]
    best = min(ends[0] for ends in parts) + min(ends[1] - ends[0] for ends in parts) + auto.optimizer
    assert auto.step <= best * (1 + 2 * WITHIN) and auto.step < fixed[1].step
    assert "auto" in str(table) and "auto: depth" in auto.listing("forward", "prefetch")
    alone = mfsdp.explain(model, (x,), options=AUTO, **given)
    assert alone.step == auto.step and not any("prefetch" in s.text for s in alone.suggestions)


@pytest.mark.slow
def test_what_is_not_known_is_not_guessed():
    """In a run on a CPU nothing is known of compute and links."""
    program = programs().forward
    line, order = told(program, AutoPrefetch(None))
    assert line.endswith("(auto: depth 1, as nothing is known of this hardware)")
    assert order == told(program, 1)[1]  # type: ignore[arg-type]
    options = Options.parse(AUTO)
    assert AutoPrefetch.of_run(Options(), []) is None
    of_cpu = AutoPrefetch.of_run(options, [torch.ones(2)])
    assert of_cpu is not None and of_cpu.machine is None
    assert dict(pipeline.chosen(options))["prefetch"].keywords["depth"] == 1, "nobody decides"  # type: ignore[attr-defined]


def test_a_gpu_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 7 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert machine.this_machine() == replace(KNOWN["h200"], memory=7 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.this_machine() == replace(KNOWN["h200"], memory=7 << 30, ranks_per_node=4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GB200")
    assert machine.this_machine() == replace(KNOWN["gb200"], memory=7 << 30), "which is no B200: 72 of them are linked"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    assert machine.this_machine() is None


@pytest.mark.parametrize("value", ["automatic", -1, True, None, 1.0])
def test_what_else_prefetch_may_not_be(value):
    with pytest.raises(ValueError, match=r"option prefetch=.*: give an integer of at least 0, or 'auto'"):
        Options.parse({"prefetch": value})
    with pytest.raises(ValueError, match="reduce_lag='auto': give an integer of at least 0$"):
        Options.parse({"reduce_lag": "auto"})


def test_a_table_without_the_pass_cannot_obey():
    rest = tuple(row for row in pipeline.PIPELINE if row[0] != "prefetch")
    with pytest.raises(ValueError, match="option prefetch='auto' is for the pass 'prefetch', which is not in passes="):
        pipeline.chosen(Options.parse({**AUTO, "passes": rest}))
    asked = []

    def mine(program: Any) -> None:
        asked.append(program.phase)

    table = pipeline.chosen(
        Options.parse({**AUTO, "passes": (*pipeline.PIPELINE, ("mine", mine))}), decide=AutoPrefetch(SLOW)
    )
    pipeline.run(programs().forward, passes=table)
    assert asked == ["forward"], "passes of the user's are not asked for every depth"


@pytest.mark.slow
def test_what_ranks_have_alike():
    """Not what may differ: lengths of sequences, and the names of process groups."""
    options = Options(prefetch="auto")

    def key(rows: int = 512, program: str = "backward", options: Options = options, **more: Any) -> str:
        with torch.device("meta"):
            given = {"world": 4, "units": [nn.Linear], **more}
            found = getattr(mfsdp.trace(Uneven(), (torch.empty(rows, 512),), **given), program)
        pipeline.run(found, upto="reduce", listings=False)
        return auto_prefetch.alike(found, options)

    assert key() == key(rows=64)
    others = [key(program="forward"), key(units=None), key(world=8), key(options=replace(options, reduce_lag=2))]
    assert len({key(), *others}) == 5


def test_the_key_of_a_cache_says_what_it_was_decided_by():
    from tests.helpers.captured import captured  # every option is there

    assert captured(Options(prefetch="auto")) != captured(Options())
    a, b = AutoPrefetch(SLOW), AutoPrefetch(replace(SLOW, memory=5))
    assert repr(a) == repr(AutoPrefetch(SLOW)) != repr(b) and repr(a) != repr(AutoPrefetch(SLOW, held=3))
    a.found["x"] = 2
    assert repr(a) == repr(AutoPrefetch(SLOW)), "what it has decided is no part of it"


def steps(compiled: Any, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        compiled(x).square().mean().backward()
    return [whole(p.grad) for p in compiled.parameters()]


def decided(folder: str, rank_of_slow: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Two steps of a rank whose hardware, and whose data, are not the other's."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}{dist.get_rank()}"
    torch._dynamo.reset()
    counters.clear()
    asked: list[str] = []
    auto_prefetch.machine_of = lambda inputs: None  # type: ignore[assignment]
    of_run = AutoPrefetch.of_run.__func__  # type: ignore[attr-defined]

    def known(cls: Any, options: Options, inputs: Any) -> Any:
        auto = of_run(cls, options, inputs)
        auto.machine = SLOW if dist.get_rank() == rank_of_slow else KNOWN["b200"]
        return auto

    best = AutoPrefetch._best

    def counted(self: AutoPrefetch, program: Any) -> tuple[int, str]:
        asked.append(program.phase)
        return (3, "three") if dist.get_rank() == rank_of_slow else (0, "none")

    AutoPrefetch.of_run, AutoPrefetch._best = classmethod(known), counted  # type: ignore[assignment, method-assign]
    notes: list[str] = []
    run_passes = pipeline.run

    def noting(program: Any, **more: Any) -> Any:
        stages = run_passes(program, **{**more, "listings": True})
        notes.append(stages["prefetch"].listing.splitlines()[1])
        return stages

    pipeline.run = noting
    try:
        torch.manual_seed(0)
        model = mfsdp.fully_shard(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), units=[nn.Linear])
        run = torch.compile(model, backend="mfsdp", dynamic=False, options=AUTO)
        torch.manual_seed(dist.get_rank())
        grads = steps(run, torch.randn(lengths[dist.get_rank()], 16))
    finally:
        AutoPrefetch.of_run, AutoPrefetch._best, pipeline.run = classmethod(of_run), best, run_passes  # type: ignore[assignment, method-assign]
        auto_prefetch.machine_of = machine.machine_of  # type: ignore[assignment]
    hits = counters["aot_autograd"].get("autograd_cache_hit", 0)
    return {"asked": asked, "hits": hits, "notes": notes, "grads": [g.double().sum().item() for g in grads]}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.inductor
def test_ranks_that_would_decide_otherwise_do_as_the_first(two_fresh_ranks, tmp_path):
    """With other hardware and other lengths. From caches nothing is decided again; a rank whose cache is cold takes
    what the other had, or, if it came first, the other does without its cache.
    """
    cold = two_fresh_ranks.run(decided, f"{tmp_path}/a", 0, (8, 6), timeout=300)
    assert all(r["asked"] == ["forward", "backward"] and r["hits"] == 0 for r in cold)
    assert cold[0]["grads"] == cold[1]["grads"]
    for mine, theirs in zip(*(r["notes"] for r in cold), strict=True):
        assert ("as has been decided elsewhere" in mine) != ("as has been decided elsewhere" in theirs)
    two_fresh_ranks.stop()
    warm = two_fresh_ranks.run(decided, f"{tmp_path}/a", 0, (8, 6), timeout=300)
    assert all(not r["asked"] and r["hits"] == 1 for r in warm) and warm[0]["grads"] == cold[0]["grads"]
    two_fresh_ranks.stop()
    (tmp_path / "a1").rename(tmp_path / "gone")  # the second rank's
    half = two_fresh_ranks.run(decided, f"{tmp_path}/a", 0, (8, 6), timeout=300)
    assert half[1]["hits"] == 0 and half[0]["grads"] == half[1]["grads"] == cold[0]["grads"]


# units="auto"


def model_of(kind: str) -> nn.Module:
    """Models of transformers, small but for what stands at their ends."""
    import transformers as t

    width, small = 256, {"hidden_size": 256, "num_attention_heads": 4}
    lm = {**small, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 32000, "use_cache": False}
    kinds: dict[str, Any] = {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=width, n_head=4, use_cache=False)),
        "gpt2 untied": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_layer=2, n_embd=width, n_head=4, use_cache=False, tie_word_embeddings=False)
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**lm, intermediate_size=688)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**lm, intermediate_size=688, tie_word_embeddings=True)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(
                **lm, intermediate_size=256, num_local_experts=4, num_experts_per_tok=2,
                experts_implementation="batched_mm",
            )
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(**small, num_hidden_layers=2, intermediate_size=512, num_labels=1000)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=width, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=32000, use_cache=False)
        ),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(**small, num_hidden_layers=2, intermediate_size=512, vocab_size=32000)
        ),
    }  # fmt: skip
    with torch.device("meta"):
        return kinds[kind]()  # type: ignore[no-any-return]


BY_HAND = {
    "gpt2": "GPT2Block", "gpt2 untied": "GPT2Block", "llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer",
    "mixtral": "MixtralDecoderLayer", "vit": "ViTLayer", "t5": "T5Block", "bert": "BertLayer",
}  # fmt: skip
ENDS = {"gpt2 untied": "lm_head", "llama": "model.embed_tokens", "mixtral": "model.embed_tokens"}
"""What is a unit of its own beside the blocks, on few ranks."""
NARROW = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)


def chosen(model: nn.Module, world: int = 8, **more: Any) -> list[str]:
    """Names of the units besides the root's."""
    given = {"mesh": local_mesh("cpu", (world,)), "device": "meta", "units": "auto", "mp_policy": NARROW, **more}
    mfsdp.fully_shard(model, **given)
    units = dict.fromkeys(m._mfsdp_unit for m in model.modules() if isinstance(m, mfsdp.FSDPModule))
    assert all(unit.buffers for unit in units if unit.fqn != "(root)"), "no unit is empty"
    return [unit.fqn for unit in units if unit.fqn != "(root)"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(BY_HAND))
def test_the_models_own_blocks_and_one_of_its_ends(kind):
    """On many ranks an end is not worth another collective; what is tied is one unit with the root."""
    model = model_of(kind)
    by_hand = [name for name, m in model.named_modules() if type(m).__name__ == BY_HAND[kind]]
    assert sorted(chosen(model)) == sorted([*by_hand, *([ENDS[kind]] if kind in ENDS else [])])
    assert chosen(model_of(kind), world=512) == by_hand
    assert len(by_hand) == (4 if kind == "t5" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("gpt2 untied", marks=pytest.mark.exhaustive), "llama"])
def test_units_that_were_chosen_are_not_slower_than_blocks(kind):
    """Where they differ."""
    ids = torch.empty(4, 128, dtype=torch.long, device="meta")
    options = {"prefetch": [1, "auto"], "lowering": "eager", "check": False}
    given: dict[str, Any] = {"world": 8, "hardware": ["h100", "a100"], "mp_policy": NARROW}
    by_hand, named = [BY_HAND[kind]], {"input_ids": ids, "labels": ids}
    table = mfsdp.compare(model_of(kind), (), named, units=["auto", by_hand], options=options, **given)
    steps = {tuple(values.items()): report.step for values, report in zip(table.values, table.reports, strict=True)}
    for values, step in steps.items():
        if ("units", "auto") in values:
            other = tuple((k, str(by_hand) if k == "units" else v) for k, v in values)
            assert step <= steps[other], (values, step, steps[other])


def test_lists_of_equal_modules_where_there_is_no_plan():
    """Encoder and decoder, in a list, a dict, a sequence; not a list of next to nothing, nor what is inside."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    class Both(nn.Module):
        def __init__(self, plan: dict[str, str] | None = None) -> None:
            super().__init__()
            self.encoder = nn.ModuleList([Layer(), Layer(), nn.Linear(4, 4)])
            self.decoder = nn.ModuleDict({"a": Layer(), "b": Layer()})
            self.rest = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
            self.gates = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
            self.auto = nn.Linear(3, 3)
            self._fsdp_plan = plan

    lists = ["encoder.0", "encoder.1", "decoder.a", "decoder.b"]
    assert chosen(Both()) == [*lists, "rest.0", "rest.2"] == chosen(Both({"layers.*": "", "encoder": ""}))
    named = {"encoder.*.parts.*": "free_full_weight", "auto": "keep_full_weight"}
    parts = [f"encoder.{i}.parts.{j}" for i in (0, 1) for j in (0, 1)]
    assert chosen(Both(named)) == [*parts, "decoder.a", "decoder.b", "rest.0", "rest.2"]
    assert chosen(Both(), units=["auto"]) == ["auto"], "in a list it is a name"
    assert chosen(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == ["0", "2"]


def test_nothing_repeated_is_one_unit_and_says_so(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(auto_wrap.log, "warning", lambda text, *values: said.append(text % values))
    layer = nn.Linear(8, 8)
    assert chosen(nn.ModuleList([layer, layer])) == [], "it is there once"
    assert chosen(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == []
    assert [text.partition(" that is")[0] for text in said] == [
        f"mfsdp: units='auto' finds nothing in {kind}" for kind in ("ModuleList", "Sequential")
    ]
    one, other = Block(8), Block(8)
    for a, b in zip(one.modules(), other.modules(), strict=True):
        a._parameters = b._parameters
    assert chosen(nn.ModuleList([one, other])) == [], "all that they have is tied"


@pytest.mark.slow
def test_ties_and_parameters_of_others():
    """Layers that share a matrix, a head that is tied, parameters that are not to be sharded."""
    model = llama(layers=3)
    layers = [f"model.layers.{i}" for i in range(3)]
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert chosen(model) == layers
    big = nn.ModuleDict({"front": nn.Embedding(9000, 1024), "layers": nn.ModuleList([Block(128), Block(128)])})
    big["norm"], big["head"] = nn.LayerNorm(1024), nn.Linear(1024, 9000, bias=False)
    layers = ["layers.0", "layers.1"]
    assert chosen(copy.deepcopy(big)) == ["front", *layers]
    assert chosen(copy.deepcopy(big), mp_policy=None) == ["front", *layers]
    assert chosen(copy.deepcopy(big), strategy=0) == ["front", *layers]
    ignoring = copy.deepcopy(big)
    assert chosen(ignoring, ignored_params=[ignoring["head"].weight]) == layers
    ignoring = copy.deepcopy(big)
    assert chosen(ignoring, ignored_params=[ignoring["front"].weight]) == [*layers, "head"]
    big["head"].weight = big["front"].weight
    assert chosen(big) == layers
    assert chosen(peft()) == [f"base_model.model.model.layers.{i}" for i in range(2)]


@pytest.mark.slow
def test_what_is_sharded_already_is_left_alone():
    """Experts over ranks of their own; blocks; the model."""
    mesh = local_mesh("cpu", (4,))
    model = llama(layers=2)
    mfsdp.fully_shard(model.model.layers[0].mlp, mesh=mesh, device="meta")
    mfsdp.fully_shard(model.model.layers[1], mesh=mesh, device="meta")
    assert chosen(model) == ["model.layers.0", "model.layers.0.mlp", "model.layers.1"]
    with pytest.raises(ValueError, match="LlamaForCausalLM is sharded already"):
        mfsdp.fully_shard(model, units="auto")
    plain = nn.ModuleList([Block(8), Block(8)])
    mfsdp.fully_shard(plain[0], mesh=mesh, device="meta")
    assert chosen(plain) == ["0", "1"]


@pytest.mark.slow
def test_what_units_may_not_be():
    with pytest.raises(ValueError, match="give a list, units=\\['automatic'\\], or 'auto' for the model's own blocks"):
        mfsdp.fully_shard(llama(), units="automatic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'auto' matches no module of .*; units='auto', no list, is for"):
        mfsdp.fully_shard(llama(), units=["auto"])
    with pytest.raises(ValueError, match="several modules are one unit; leave out units="):
        mfsdp.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], units="auto")


@pytest.mark.slow
def test_what_was_chosen_is_traced_again_on_other_ranks():
    """A plan for a model that is sharded has the units that it has, whatever would be chosen there."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mfsdp.fully_shard(model, units="auto", device="meta", mesh=local_mesh("cpu", (1,)))
    programs = mfsdp.trace(model, (torch.empty(4, 8),), world=16)
    assert [u.fqn for u in programs.forward.units] == ["0", "2"]  # type: ignore[union-attr]
    table = mfsdp.compare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.empty(4, 8),), units=[["1"], "auto"])
    assert [len(r.views[0].units) for r in table.reports] == [2, 2] and "auto" in str(table)


@pytest.mark.slow
def test_units_train_as_those_by_hand():
    def trained(units: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mfsdp.fully_shard(llama(), units=units)
        run = torch.compile(model, backend="mfsdp", options={"lowering": "eager", **AUTO})
        torch._dynamo.reset()
        run(input_ids=torch.arange(8)[None]).logits.square().mean().backward()
        return [whole(p.grad) for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained("auto"), trained(["LlamaDecoderLayer"]), strict=True))
