"""The backend: options, dumps, models that were never sharded, one process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import warnings
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from functorch.compile import config as functorch_config
from torch import nn
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor import config as inductor_config

import mfsdp
from mfsdp import pipeline
from mfsdp.compiler import backend, lowering
from mfsdp.config.options import Options
from mfsdp.runtime import kernels
from tests.helpers.logs import logged
from tests.helpers.models import CASES, GPT, MLP, Block
from tests.helpers.parity import averaged, batches, error

EAGER = {"lowering": "eager"}


def step(run: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = run(x).square().mean()
    loss.backward()
    return loss.detach()


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefetsch": 2},
            r"does not know the option 'prefetsch'; valid options are prefetch \(default 1\), reduce_lag",
        ),
        ({"lowering": "cuda"}, r"lowering='cuda': choose one of \('inductor', 'stitched', 'whole', 'eager'\)"),
        ({"check": "yes"}, "check='yes': choose True or False"),
        ({"dump": 3}, "dump=3: give the path of a folder"),
        ({"prefetch": -1}, "prefetch=-1: give an integer of at least 0"),
        ({"reduce_lag": True}, "reduce_lag=True: give an integer of at least 0"),
        ({"max_unsharded": 0}, "max_unsharded=0: give an integer of at least 1"),
    ],
)
def test_bad_options_are_refused_by_the_first_call(options, message):
    run = torch.compile(MLP(), backend="mfsdp", options=options)
    with pytest.raises(ValueError, match=message):
        run(torch.randn(2, 24))


def test_every_option_is_checked_and_on_the_page():
    page = Path(__file__).parent.parent.joinpath("docs", "guides", "options.md").read_text()
    for field in dataclasses.fields(Options):
        assert f"| `{field.name}` |" in page
        if field.name not in ("upto", "passes"):  # `pipeline` checks them
            with pytest.raises((ValueError, NotImplementedError)):
                Options.parse({field.name: object()})


def test_megatrons_defaults_change_nothing():
    """``disable_symmetric_registration`` is about what ``nccl_ub`` registers; alone it means nothing there either."""
    assert Options.parse({"nccl_ub": False, "disable_symmetric_registration": True}) == Options.parse({
        "disable_symmetric_registration": True
    })  # fmt: skip
    with pytest.raises(ValueError, match="disable_symmetric_registration=None: choose True or False"):
        Options.parse({"disable_symmetric_registration": None})


def test_cuda_graphs_are_of_programs():
    with pytest.raises(ValueError, match="option cuda_graph='step': choose 'programs' or None; call mfsdp.capture_ste"):
        Options.parse({"cuda_graph": "step"})
    for other in ({"pool": False}, {"lowering": "eager"}, {"lowering": "whole"}):
        with pytest.raises(ValueError, match="cuda_graph='programs': graphs replay subgraphs .* leave out pool="):
            Options.parse({"cuda_graph": "programs", **other})
    assert backend._with_mode(None, "reduce-overhead") == {"cuda_graph": "programs"}
    assert backend._with_mode({"pool": True}, "default") == {"pool": True}


def test_an_unsharded_model_beside_a_sharded_one(monkeypatch):
    """Whose parameters are not gathered to find out which model it is."""
    with mfsdp.fake_ranks(2):
        other = mfsdp.fully_shard(MLP(), units=[nn.Linear])  # stays
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_warned_unsharded", False)
    with logged() as told:
        torch.compile(nn.Linear(2, 2), backend="mfsdp", options=EAGER)(torch.ones(2, 2))
    assert any("the model is not sharded (one process, nothing to communicate)" in text for text in told), other


def test_modes_are_refused():
    torch._dynamo.reset()
    run = torch.compile(MLP(), backend="mfsdp", mode="max-autotune")
    with pytest.raises(ValueError, match="mode='max-autotune'; use options=.*or mode='reduce-overhead'"):
        run(torch.randn(2, 24))


def test_a_misspelt_name_gets_a_suggestion():
    model = mfsdp.fully_shard(MLP())
    for name, words in (("mfspd", ['mfsdp: did you mean backend="mfsdp"?']), ("another", [])):
        with pytest.raises(Exception, match="Invalid backend") as info:
            torch.compile(model, backend=name)
        assert getattr(info.value, "__notes__", []) == words


def test_functorch_has_what_torch_reads():
    """Settings of another object would be patched in vain."""
    import functorch.compile
    import torch._functorch.config
    import torch._functorch.partitioners as partitioners

    assert functorch.compile.config is torch._functorch.config
    name = "min_cut_rematerialization_partition"
    assert getattr(functorch.compile, name) is getattr(partitioners, name)


def test_a_memory_budget_is_refused():
    """With dropout its gradients are wrong upstream; without, nobody has to know which operations are random."""
    torch._dynamo.reset()  # other tests have compiled it up to torch's limit
    run = torch.compile(MLP(), backend="mfsdp", options=EAGER)
    with functorch_config.patch(activation_memory_budget=0.5), pytest.raises(ValueError, match="budget of 0.5"):
        run(torch.randn(2, 24))


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="from torch 2.13 on")
def test_a_memory_budget_for_a_region_is_refused():
    class Thrifty(MLP):
        def forward(self, x):
            with torch.autograd.graph.region_activation_memory_budget(0.3):
                return super().forward(x)

    with pytest.raises(ValueError, match="budget of 0.3.*torch.utils.checkpoint"):
        torch.compile(mfsdp.fully_shard(Thrifty()), backend="mfsdp", options=EAGER)(torch.randn(2, 24))


def test_async_tensor_parallelism_of_inductor_is_said_to_do_nothing():
    with inductor_config.patch(_micro_pipeline_tp=True), pytest.warns(UserWarning, match="together and mfsdp.overl"):
        mfsdp.trace(MLP(), (torch.randn(2, 24),), lowering="inductor")


@pytest.mark.slow
def test_nothing_is_captured_into_a_cuda_graph(monkeypatch):
    """A replay would repeat what runs in Python in every step: refresh, hold, the first store of an accumulator."""
    torch._dynamo.reset()
    seen = []

    def note(graph, example, **kwargs):
        seen.append((bool(kwargs["cudagraphs"]), torch._inductor.config.triton.cudagraphs))
        return boxed_nop(graph, list(example))

    monkeypatch.setitem(lowering.LOWERINGS, "inductor", partial(lowering.inductor, compile=note))

    class Asked(MLP):
        def forward(self, x):
            with torch._dynamo.override_cudagraphs(fwd=True, bwd=True):
                return super().forward(x)

    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        for build in (MLP, Asked) if hasattr(torch._dynamo, "override_cudagraphs") else (MLP,):
            torch.compile(mfsdp.fully_shard(build()), backend="mfsdp")(torch.randn(2, 24)).sum().backward()
            assert seen == [(False, False)] * 2, "forward and backward"
            seen.clear()


def test_defaults():
    assert Options.parse(None) == Options()
    assert Options.parse({"check": False}).lowering == "inductor"


# one process


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_one_process_without_a_process_group(sharded, monkeypatch):
    told = []
    monkeypatch.setattr(backend.log, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(backend, "_warned_unsharded", False)
    torch.manual_seed(0)
    reference = GPT(layers=1)
    model = copy.deepcopy(reference)
    if sharded:
        mfsdp.fully_shard(model, units=[Block])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    run = torch.compile(model, backend="mfsdp", options=EAGER)
    ids = torch.randint(31, (2, 8))
    for _ in range(3):
        assert error(step(run, ids), step(reference, ids)) < 1e-6
        for m, optimizer in zip((model, reference), optimizers):
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        full = p.full_tensor() if sharded else p
        assert error(full.detach(), q.detach()) < 1e-5
    assert len(told) == (0 if sharded else 1)
    assert sharded or ("one process" in told[0] and "mfsdp.fully_shard(model, units=[" in told[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lowering", "marked"),
    [
        ("eager", False), ("eager and dump", True),
        pytest.param("inductor", True, marks=pytest.mark.inductor),
    ],
)  # fmt: skip
def test_shapes_may_change(monkeypatch, tmp_path, lowering, marked):
    """A second length compiles a dynamic program, or the first one if it is marked; a third needs no other."""
    runs = []
    run_pipeline = pipeline.run
    monkeypatch.setattr(pipeline, "run", lambda p, **kwargs: runs.append(p.phase) or run_pipeline(p, **kwargs))
    torch.manual_seed(0)
    reference = MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up"])
    torch._dynamo.reset()
    options = {"lowering": lowering.split()[0], **({"dump": str(tmp_path)} if "dump" in lowering else {})}
    run = torch.compile(model, backend="mfsdp", options=options)
    with functorch_config.patch(enable_autograd_cache=False):  # or an earlier run's programs are loaded
        for rows in (4, 6, 9, 11):
            x = torch.randn(rows, 24)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            assert error(step(run, x), step(reference, x)) < 1e-6
    assert runs == ["forward", "backward"] * (1 if marked else 2)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < 1e-5


class Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.down(x.relu()).tanh()


@pytest.mark.slow
def test_pieces_of_a_sharded_model_are_not_said_to_be_unsharded(monkeypatch):
    told = []
    monkeypatch.setattr(backend.log, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(backend, "_warned_unsharded", False)
    step(torch.compile(mfsdp.fully_shard(Broken(), units=["up"]), backend="mfsdp", options=EAGER), torch.randn(2, 4))
    assert not told
    step(torch.compile(Broken(), backend="mfsdp", options=EAGER), torch.randn(2, 4))
    assert len(told) == 1


@pytest.mark.slow
def test_a_sharded_model_compiled_by_another_backend_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "_told", False)
    torch.manual_seed(0)
    reference = MLP()
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["up"])
    run = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 24)
    with pytest.warns(UserWarning, match=r"unit '\(root\)' of MLP.* compiled by another backend") as seen:
        for _ in range(2):
            assert error(step(run, x), step(reference, x)) < 1e-6
    assert sum("another backend" in str(w.message) for w in seen) == 1
    assert error(model.up.weight.grad.full_tensor(), reference.up.weight.grad) < 1e-5
    monkeypatch.setattr(kernels, "_told", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for upto in ("capture", None):
            torch._dynamo.reset()
            step(torch.compile(model, backend="mfsdp", options=EAGER if upto is None else {**EAGER, "upto": upto}), x)


@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("held", [False, True])
def test_backward_twice_through_one_graph(held, strategy):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = mfsdp.fully_shard(copy.deepcopy(reference), units=["0", "2"], strategy=strategy)
    run = torch.compile(model, backend="mfsdp", options=EAGER)
    x = torch.randn(2, 4)
    for m in (run, reference):
        if not held:
            m(x).sum().backward()  # compiled without a word of what is to come
            m.zero_grad()
        loss = m(x).square().sum()
        with mfsdp.no_sync(model, hold=True) if held and m is run else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        loss.backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < 1e-5


# dumps


@pytest.mark.slow
def test_dumps(tmp_path, monkeypatch):
    model = mfsdp.fully_shard(MLP(), units=["up"])
    step(torch.compile(model, backend="mfsdp", options={**EAGER, "dump": str(tmp_path / "a")}), torch.randn(2, 24))
    names = sorted(p.name.split(".", 1)[1] for p in (tmp_path / "a").iterdir())
    assert names.pop() == "report.html"
    stages = [f"{i}.{name}" for i, name in enumerate(["capture", *(name for name, _ in pipeline.PIPELINE)])]
    assert names == sorted(f"{phase}.{stage}.txt" for phase in ("backward", "forward") for stage in stages)
    text = next((tmp_path / "a").glob("*.forward.*.reshard.txt")).read_text()
    assert text.startswith("; mfsdp  MLP  reshard  forward       world 1\n; change none")
    monkeypatch.setenv("MFSDP_DUMP", str(tmp_path / "b"))
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="mfsdp", options=EAGER)(torch.randn(2, 24))
    assert len(list((tmp_path / "b").glob("*.inference.*.txt"))) == len(stages)


# models that were never sharded, on several ranks


def unsharded(name: str, lowering: str) -> tuple[float, float, int]:
    """Errors of loss and gradients of a model that nobody sharded, and how many all-reduces a backward takes."""
    case = CASES[name]
    torch.manual_seed(0)
    reference = case.build()
    model = copy.deepcopy(reference)
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
    x = batches(case)[dist.get_rank()]
    calls = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(1), reduce(*a, **k))[1]
    try:
        loss = case.loss(run, x)
        loss.backward()
    finally:
        dist.all_reduce = reduce
    refer = torch.compile(reference, backend="aot_eager") if case.traced else reference
    want = case.loss(refer, x)
    want.backward()
    averaged(reference)
    worst = 0.0
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert type(p) is nn.Parameter and (p.grad is None) == (q.grad is None), n
        if q.grad is not None:
            worst = max(worst, error(p.grad, q.grad, 1e-6))
    return error(loss.detach(), want.detach()), worst, len(calls)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["mlp", "gpt_checkpointed", "twice", "unused", "frozen"])
def test_unsharded_models_average_their_gradients(two_ranks, name):
    layers = 4 if name == "gpt_checkpointed" else 3
    for loss, grads, calls in two_ranks.run(unsharded, name, "eager"):
        assert loss == 0 and grads < 1e-6
        assert calls <= layers, "one all-reduce per layer, not per parameter"


@pytest.mark.dist
@pytest.mark.inductor
def test_unsharded_under_inductor(two_ranks):
    for loss, grads, _ in two_ranks.run(unsharded, "mlp", "inductor", timeout=300):
        assert loss < 1e-5 and grads < 1e-4


def dumped_by(folder: str) -> int:
    model = mfsdp.fully_shard(MLP(), units=["up"])
    step(torch.compile(model, backend="mfsdp", options={**EAGER, "dump": folder}), torch.randn(2, 24))
    dist.barrier()
    return len(list(Path(folder).glob("*.txt")))


@pytest.mark.slow
def test_a_dump_keeps_no_model_alive(tmp_path):
    """Nor does a plan, and a profile."""
    model = mfsdp.fully_shard(MLP(), units=["up"])
    run = torch.compile(model, backend="mfsdp", options={**EAGER, "dump": str(tmp_path)})
    step(run, torch.randn(2, 24))
    mfsdp.explain(model, (torch.randn(2, 24),), world=2)
    with mfsdp.profile(run, steps=1) as seen:
        step(run, torch.randn(2, 24))
        seen.step()
    buffers = [weakref.ref(m._mfsdp_unit.buffers[0]) for m in (model, model.up)]
    assert list(tmp_path.glob("*.report.html"))
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert not [b for b in buffers if b() is not None] and seen.lines


@pytest.mark.slow
def test_a_dump_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model = mfsdp.fully_shard(MLP(), units=["up"])
    step(torch.compile(model, backend="mfsdp", options={**EAGER, "dump": str(tmp_path / "file")}), torch.randn(2, 24))
    assert model.up.weight.grad is not None and (tmp_path / "file").read_text() == ""


@pytest.mark.dist
def test_one_rank_writes_the_listings(two_ranks, tmp_path):
    assert two_ranks.run(dumped_by, str(tmp_path)) == [2 * (1 + len(pipeline.PIPELINE))] * 2


def bf16(lowering: str) -> tuple[float, str]:
    """bf16 compute over fp32 main weights, against a reference that does the same by hand."""
    torch.manual_seed(0)
    reference = GPT(tied=False, layers=1)
    model = mfsdp.fully_shard(
        copy.deepcopy(reference), units=[Block], mp_policy=mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        ids = torch.randint(31, (2, 8))
        low = copy.deepcopy(reference).bfloat16()
        low.zero_grad()
        for m in (run, low):
            m(ids).float().square().mean().backward()
        for p, q in zip(reference.parameters(), low.parameters()):
            p.grad = q.grad.float()
        averaged(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dtypes = {str(p.dtype) for p in model.parameters()}
    assert dtypes == {"torch.float32"}
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(p.full_tensor().detach(), q.detach()) for p, q in pairs), ""


@pytest.mark.dist
def test_bf16_compute_over_fp32_main_weights(two_ranks):
    assert all(worst == 0 for worst, _ in two_ranks.run(bf16, "eager"))


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.exhaustive
def test_bf16_compute_over_fp32_main_weights_inductor(two_ranks):
    assert all(worst < 2e-2 for worst, _ in two_ranks.run(bf16, "inductor", timeout=300))


def test_a_program_that_computes_nothing_has_no_body_to_ask():
    run = torch.compile(lambda x: x[None].transpose(0, 1), backend="mfsdp")
    with torch.no_grad():
        assert run(torch.ones(3, 4)).shape == (3, 1, 4)
