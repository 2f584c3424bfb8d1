"""Accelerate's FSDP configuration of version 2 means mfsdp: loops, checkpoints, transformers' Trainer, PEFT, TRL."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mfsdp
from tests.helpers.models import GPT, Block, llama
from tests.helpers.parity import averaged, error, whole
from tests.helpers.ranks import collectives_told, here
from tests.helpers.trainers import environment, fresh_logits, logged, trainer

EAGER = {"lowering": "eager"}


@contextmanager
def accelerator(*, plugin: dict[str, Any] | None = None, **kwargs: Any) -> Iterator[Any]:
    """An Accelerator on CPUs, as `accelerate launch --cpu` has it, and none behind it."""
    with environment():
        import accelerate

        from mfsdp.integrations.accelerate import ShardingPlugin

        fields = {"options": EAGER, **(plugin or {})}
        yield accelerate.Accelerator(cpu=True, fsdp_plugin=ShardingPlugin(**fields), **kwargs)


def data(count: int, size: int = 2, length: int = 8) -> torch.Tensor:
    """The same on every rank: each takes its part of it."""
    return torch.randint(31, (count, size, length), generator=torch.Generator().manual_seed(5))


class Model(GPT):
    """With a loss, as transformers' models have it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


BLOCKS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}


def small() -> nn.Module:
    return Model(layers=1)


def pair(build: Callable[[], nn.Module] = small) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = build()
    return model, copy.deepcopy(model)


def far(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any parameter."""
    theirs = dict(reference.named_parameters())
    ours = {n.replace("._checkpoint_wrapped_module", ""): p for n, p in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    return max(float((whole(p).detach().float() - theirs[n].detach().float()).abs().max()) for n, p in ours.items())


def reference_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor], parts: int
) -> torch.Tensor:
    """One step of the unsharded model on all ranks' batches; the norm before clipping."""
    for x in batches:
        (model(x) / parts).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def loop(order: str, plugin: dict[str, Any], layers: int = 1) -> dict[str, Any]:
    """Five batches per rank, two to a step: the last step has one. Beside the unsharded model."""
    with accelerator(plugin=plugin, gradient_accumulation_steps=2) as acc:
        given, reference = pair(lambda: Model(layers=layers))
        rows = data(20).flatten(0, 1)
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        things = {"m": given, "o": adamw(given), "l": loader}
        prepared = dict(zip(order, acc.prepare(*(things[k] for k in order)), strict=True))
        model, optimizer, loader = (prepared[k] for k in "mol")
        assert model is given and isinstance(model, mfsdp.FSDPModule) and acc.is_fsdp2
        theirs = adamw(reference)
        told: list[str] = []
        norms, scattered, waiting = [], [], []
        with collectives_told(lambda kind, group: told.append(kind)):
            for i, x in enumerate(loader):
                both = rows.split(4)[2 * i : 2 * i + 2]
                assert torch.equal(x, both[acc.process_index]), "data of its own"
                waiting += both
                with acc.accumulate(model):
                    del told[:]
                    acc.backward(model(x))
                    scattered.append(told.count("scatter"))
                    if acc.sync_gradients:
                        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
                        norms.append(error(norm, reference_step(reference, theirs, waiting, 4)))
                        waiting = []
                    optimizer.step()
                    optimizer.zero_grad()
        units = {id(m._mfsdp_unit) for m in model.modules() if isinstance(m, mfsdp.FSDPModule)}
        return {"far": far(model, reference), "norms": norms, "scattered": scattered, "units": len(units)}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("order", "plugin", "layers", "units"),
    [
        ("mol", BLOCKS, 2, 3),
        ("lom", {"auto_wrap_policy": "size_based_wrap", "min_num_params": 3000, "reshard_after_forward": False}, 1, 3),
        pytest.param("oml", {}, 2, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_a_loop_is_the_unsharded_one(ranks, order, plugin, layers, units):
    for seen in ranks.run(loop, order, plugin, layers):
        assert seen["far"] < 2e-4 and max(seen["norms"]) < 1e-5 and len(seen["norms"]) == 3
        kept = [s == 0 for s in seen["scattered"]]
        assert kept == [True, False, True, False, False], "nothing travels between the steps"
        assert seen["units"] == units


@pytest.mark.dist
@pytest.mark.inductor
@pytest.mark.exhaustive
def test_a_loop_by_inductor(ranks):
    for seen in ranks.run(loop, "mlo", {**BLOCKS, "options": {}}, timeout=300):
        assert seen["far"] < 2e-4 and max(seen["norms"]) < 1e-5 and seen["units"] == 2


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())


def recomputed() -> dict[str, Any]:
    """What is checkpointed drops the same numbers again in backward: gradients are the unsharded ones."""
    policy = {**BLOCKS, "transformer_cls_names_to_wrap": ["Dropping"]}
    with accelerator(plugin={**policy, "activation_checkpointing": True}) as acc:
        model, reference = pair(lambda: nn.Sequential(Dropping(), Dropping()))
        model, _ = acc.prepare(model, adamw(model))
        x = torch.randn(4, 16)
        for m in (model, reference):
            torch.manual_seed(acc.process_index)
            m(x + acc.process_index).square().mean().backward()
        averaged(reference)
        far = [error(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
        state = acc.get_state_dict(model)
        wrapped = sum(type(m).__name__ == "CheckpointWrapper" for m in model.modules())
        return {"wrapped": wrapped, "names": not state or state.keys() == reference.state_dict().keys(),
                "far": max(far) < 1e-6}  # fmt: skip


@pytest.mark.dist
def test_activation_checkpointing(ranks):
    for seen in ranks.run(loop, "mol", {**BLOCKS, "activation_checkpointing": True}):
        assert seen["far"] < 2e-4 and max(seen["norms"]) < 1e-5 and seen["units"] == 2
    for seen in ranks.run(recomputed):
        assert seen == {"wrapped": 2, "names": True, "far": True}


# State


def steps(acc: Any, model: nn.Module, optimizer: Any, batches: torch.Tensor) -> None:
    for both in batches:
        acc.backward(model(both[acc.process_index :: 2]))
        acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """This rank's rows of everything: weights, moments, numbers of steps."""
    found = [x for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]
    return [(x.to_local() if hasattr(x, "to_local") else x).clone() for x in found]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))


def stored(folder: str, kind: str) -> dict[str, Any]:
    """Saved in the middle, loaded into a model from another seed, and gone on from there; in other files."""
    fields = {**BLOCKS, "state_dict_type": kind}
    with accelerator(plugin=fields) as acc:
        model, _ = pair()
        model, optimizer = acc.prepare(model, adamw(model))
        steps(acc, model, optimizer, data(1, 4))
        acc.save_state(folder)
        saved = values(model, optimizer)
        reference = {n: whole(p).detach() for n, p in model.named_parameters()}
        given = acc.get_state_dict(model)
        acc.save_model(model, folder + "/model")
        steps(acc, model, optimizer, data(2, 4)[1:])
        gone_on = values(model, optimizer)
    keys = {*reference, "head.weight"}  # tied
    wrong = [n for n, t in given.items() if not torch.equal(t, reference.get(n, reference["tokens.weight"]))]
    with accelerator(plugin=fields) as acc:
        torch.manual_seed(1)
        model = small()
        optimizer, model = acc.prepare(adamw(model), model)
        acc.load_state(folder)
        loaded = same(values(model, optimizer), saved)
        steps(acc, model, optimizer, data(2, 4)[1:])
        return {"loaded": loaded, "gone_on": same(values(model, optimizer), gone_on), "wrong": wrong,
                "keys": set(given) == (keys if acc.is_main_process else set()), "files": sorted(os.listdir(folder)),
                "reference": reference}  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_what_was_saved_is_loaded(ranks, kind, tmp_path):
    from safetensors.torch import load_file

    for seen in ranks.run(stored, str(tmp_path), kind):
        assert seen["loaded"] and seen["gone_on"] and not seen["wrong"] and seen["keys"]
        assert ("optimizer.bin" in seen["files"]) == (kind == "FULL_STATE_DICT")
    file, reference = load_file(tmp_path / "model" / "model.safetensors"), seen["reference"]
    assert file.keys() == {*reference, "head.weight"}
    assert all(torch.equal(t, reference.get(n, reference["tokens.weight"])) for n, t in file.items())


def loaded_by_one(where: str) -> dict[str, Any]:
    """A model whose values only rank 0 has, or nobody; its optimizer's parameters stay in their groups."""
    tied = where != "everywhere"  # from the meta device what is tied is drawn as its last owner draws it
    torch.manual_seed(0)
    reference = llama(tied=tied)
    others = where == "others" and dist.get_rank() > 0
    with accelerator(plugin={"cpu_ram_efficient_loading": where != "everywhere"}) as acc:
        torch.manual_seed(0 if where == "everywhere" else dist.get_rank())
        with torch.device("meta" if where == "everywhere" or others else "cpu"):
            model = llama(tied=tied)
        if others:  # as transformers leaves it: only these are real
            for m, r in zip(model.modules(), reference.modules()):
                m._buffers.update({n: torch.zeros_like(b, device="cpu") for n, b in r._buffers.items()})
        names = [n for n, _ in model.named_parameters()]
        groups = [{"params": list(model.parameters())[3:], "lr": 1.0}, {"params": list(model.parameters())[:3]}]
        optimizer = torch.optim.SGD(groups, lr=0.5)
        torch.manual_seed(0)
        model, prepared = acc.prepare(model, optimizer)
        params = dict(model.named_parameters())
        order = [p for group in prepared.param_groups for p in group["params"]]
        right = [p is params[n] for p, n in zip(order, names[3:] + names[:3], strict=True)]
        buffers = [torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True)]
        shared = model.lm_head.weight is model.model.embed_tokens.weight
        return {"far": far(model, reference), "order": all(right), "tied": shared == tied, "buffers": all(buffers)}


@pytest.mark.dist
@pytest.mark.parametrize("where", ["everywhere", "others", "nowhere"])
def test_values_that_one_rank_has_or_none(ranks, where):
    for seen in ranks.run(loaded_by_one, where):
        assert seen == {"far": 0.0, "order": True, "tied": True, "buffers": True}


def mixed(plugin: dict[str, Any]) -> dict[str, Any]:
    with accelerator(plugin={**BLOCKS, **plugin}, mixed_precision="bf16") as acc:
        model, reference = pair(Model)
        model.bfloat16()
        model.places.requires_grad_(False)
        seen: list[torch.dtype] = []
        model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
        model, optimizer = acc.prepare(model, adamw(model))
        x = data(1, 4)[0]
        loss = model(x[acc.process_index :: 2])
        acc.backward(loss)
        optimizer.step()
        theirs = [reference(x[r::2]).item() for r in range(2)][acc.process_index]
        return {"loss": loss.item() - theirs, "inside": seen[0], "out": loss.dtype, "main": model.norm.weight.dtype,
                "moments": optimizer.state[model.norm.weight]["exp_avg"].dtype, "frozen": model.places.weight.dtype,
                "grad": model.norm.weight.grad.dtype}  # fmt: skip


@pytest.mark.dist
def test_mixed_precision(ranks):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    bf16, fp32 = torch.bfloat16, torch.float32
    wide = {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)}
    for plugin, out in (({}, bf16), (wide, bf16)):
        for seen in ranks.run(mixed, plugin):
            assert abs(seen.pop("loss")) < 0.05
            assert seen == {"inside": bf16, "out": out, "main": fp32, "moments": fp32, "frozen": bf16, "grad": fp32}


# transformers' Trainer

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def trained(folder: str) -> dict[str, Any]:
    """By Trainer: under DDP, under ours, and from the middle of that on."""
    import mfsdp.integrations.accelerate

    model, again = pair(lambda: llama(1))
    with environment():
        ddp = trainer(folder + "/ddp", again, save_strategy="no")
        ddp.train()
        theirs = ddp.evaluate()["eval_loss"]
    with environment(MFSDP_OPTIONS=json.dumps(EAGER)):
        ours = trainer(folder + "/ours", model, **FSDP)
        ours.train()
        assert ours.model is model and isinstance(model, mfsdp.FSDPModule)
        evaluated = ours.evaluate()["eval_loss"]
        ours.save_model(folder + "/saved")
        differs = far(model, again)
    torch.manual_seed(1)
    other = llama(1)
    with environment(MFSDP_OPTIONS=json.dumps(EAGER)):
        resumed = trainer(folder + "/ours", other, **FSDP)
        resumed.train(resume_from_checkpoint=folder + "/ours/checkpoint-2")
        bitwise = [torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters())]
    with torch.no_grad():
        logits = again(torch.arange(12, device=here())[None]).logits.cpu()
    return {"ours": [*logged(ours, "loss", "grad_norm"), evaluated], "far": differs, "bitwise": bitwise,
            "ddp": [*logged(ddp, "loss", "grad_norm"), theirs], "logits": logits}  # fmt: skip


@pytest.mark.dist
@pytest.mark.slow
def test_trainer_trains_evaluates_saves_and_resumes(ranks, tmp_path):
    seen = ranks.run(trained, str(tmp_path), timeout=300)[0]
    assert len(seen["ours"]) == 3 + 3 + 1
    assert seen["ours"] == pytest.approx(seen["ddp"], rel=1e-4)
    assert seen["far"] < 1e-3 and all(seen["bitwise"])
    assert (fresh_logits(tmp_path / "saved") - seen["logits"]).abs().max() < 1e-3


def adapted(folder: str) -> dict[str, Any]:
    """LoRA's adapters on a frozen base, by Trainer, under DDP and under ours, with other ranks' base on meta."""
    from peft import LoraConfig, get_peft_model

    import mfsdp.integrations.accelerate  # noqa: F401

    def build() -> nn.Module:
        torch.manual_seed(0)
        base = llama(1)
        if dist.get_rank() == 0:
            base.save_pretrained(folder)
        torch.manual_seed(1)
        return get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))

    model, again = build(), build()
    with environment():
        ddp = trainer(folder + "/ddp", again, save_strategy="no", max_steps=2)
        ddp.train()
    with environment(MFSDP_OPTIONS=json.dumps(EAGER)):
        ours = trainer(folder + "/ours", model, max_steps=2, **FSDP)
        ours.train()
        ours.save_model(folder + "/adapters")
    with torch.no_grad():
        logits = again(input_ids=torch.arange(12)[None]).logits
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    return {"ours": logged(ours, "loss", "grad_norm"), "ddp": logged(ddp, "loss", "grad_norm"), "logits": logits,
            "far": far(model, again), "frozen": len(frozen), "files": os.listdir(folder + "/adapters")}  # fmt: skip


@pytest.mark.dist
@pytest.mark.exhaustive  # with a quantized model beside them: test_qlora
def test_trainer_with_adapters(ranks, tmp_path):
    seen = ranks.run(adapted, str(tmp_path), timeout=300)[0]
    assert seen["ours"] == pytest.approx(seen["ddp"], rel=1e-4) and seen["far"] < 1e-3 and seen["frozen"] > 5
    assert "adapter_model.safetensors" in seen["files"] and "model.safetensors" not in seen["files"]
    assert (fresh_logits(tmp_path, str(tmp_path / "adapters")) - seen["logits"]).abs().max() < 1e-3


# What is asked for otherwise, and what is refused


def alone() -> dict[str, Any]:
    """Model first, optimizer later; once more; a second model for evaluation; loaders and nothing else."""
    with accelerator(plugin=BLOCKS) as acc:
        teacher = acc.prepare(small())
        given, reference = pair()
        model = acc.prepare_model(given)
        before = acc.prepare(model)
        optimizer = acc.prepare(adamw(model))
        again = acc.prepare(model, optimizer)
        loader, nothing = acc.prepare(torch.utils.data.DataLoader(data(4)), None)
        first = next(iter(loader))[0]
        steps(acc, model, optimizer, data(1, 4))
        theirs = adamw(reference)
        reference_step(reference, theirs, [data(1, 4)[0][r::2] for r in range(2)], 2)
        with torch.no_grad():
            teacher.eval()(data(1, 4)[0])
        return {
            "sharded": isinstance(teacher, mfsdp.FSDPModule), "same": model is given is before is again[0],
            "optimizer": again[1] is optimizer, "far": far(model, reference) < 1e-4, "nothing": nothing is None,
            "models": acc._models == [model, teacher], "data": torch.equal(first, data(4)[acc.process_index]),
        }  # fmt: skip


@pytest.mark.dist
def test_one_thing_at_a_time(ranks):
    for seen in ranks.run(alone):
        assert all(seen.values()), seen


def replicated() -> dict[str, Any]:
    """On a mesh of accelerate's: two groups of two ranks."""
    from accelerate import ParallelismConfig

    with accelerator(plugin=BLOCKS, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)) as acc:
        model, reference = pair()
        model, optimizer = acc.prepare(model, adamw(model))
        batches = data(1, 4)[0].split(1)
        acc.backward(model(batches[acc.process_index]))
        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        theirs = reference_step(reference, adamw(reference), batches, 4)
        cut = model.tokens.weight.to_local().shape[0] / model.tokens.weight.shape[0]
        return {"far": far(model, reference) < 1e-4, "norm": error(norm, theirs) < 1e-5, "cut": 0.3 < cut < 0.7}


@pytest.mark.dist
def test_replicas(four_ranks):
    for seen in four_ranks.run(replicated):
        assert all(seen.values()), seen


def compiled_before() -> dict[str, Any]:
    """A compiled model keeps its options; a sharded one its units; both are trained."""
    with accelerator(plugin=BLOCKS) as acc:
        model, reference = pair()
        wrapper = torch.compile(model, backend="mfsdp", options={**EAGER, "prefetch": 0})
        prepared, optimizer = acc.prepare(wrapper, adamw(model))
        with acc.no_sync(prepared):
            acc.backward(prepared(data(1, 4)[0][acc.process_index :: 2]) / 2)
        acc.backward(prepared(data(1, 4)[0][acc.process_index :: 2]) / 2)
        acc.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        reference_step(reference, adamw(reference), [data(1, 4)[0][r::2] for r in range(2)], 2)
        state = acc.get_state_dict(prepared)
        own = mfsdp.fully_shard(small(), strategy="optim_grads", units=[nn.Linear])
        units = sum(isinstance(m, mfsdp.FSDPModule) for m in own.modules())
        acc.prepare(own, adamw(own))
        after = sum(isinstance(m, mfsdp.FSDPModule) for m in own.modules())
        return {"wrapper": prepared is wrapper, "inner": isinstance(model, mfsdp.FSDPModule), "units": units == after,
                "far": far(model, reference) < 1e-4, "names": not state or "head.weight" in state}  # fmt: skip


@pytest.mark.dist
def test_compiled_and_sharded_before(ranks):
    for seen in ranks.run(compiled_before):
        assert all(seen.values()), seen


def refused() -> dict[str, str]:
    """What is said, by what was done."""
    import accelerate
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TorchDynamoPlugin
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from mfsdp.integrations.accelerate import ShardingPlugin

    said: dict[str, str] = {}

    @contextmanager
    def told(name: str) -> Iterator[None]:
        try:
            yield
            said[name] = "nothing"
        except (ValueError, NotImplementedError) as error:
            said[name] = str(error)

    with told("version"), environment():
        accelerate.Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    with told("no cpu"), environment(ACCELERATE_USE_CPU="false"):
        accelerate.Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    with told("backend"):
        TorchDynamoPlugin(backend="mfsdp")
    with told("plugin's option"):
        ShardingPlugin(options={"prefech": 1})
    for name, fields, more in (
        ("dynamo", {}, {"dynamo_plugin": TorchDynamoPlugin(backend="inductor")}),
        ("fp16", {}, {"mixed_precision": "fp16"}),
        ("offload", {"cpu_offload": True}, {}),
        ("policy", {"auto_wrap_policy": ModuleWrapPolicy([Block])}, {}),
        ("no blocks", {"activation_checkpointing": True}, {}),
        ("offloaded", {"activation_checkpointing": True, "activation_checkpointing_offload": True}, {}),
        ("argument", {"sharding": {"strategy": 7}}, {}),
        ("fp8", {}, {"mixed_precision": "fp8", "kwargs_handlers": [AORecipeKwargs()]}),
        ("cp", {}, {"parallelism_config": ParallelismConfig(cp_size=2)}),
    ):
        with told(name), accelerator(plugin=fields, **more) as acc:
            model = Model()
            optimizer = adamw(model)
            kept = [p for g in optimizer.param_groups for p in g["params"]]
            try:
                acc.prepare(model, optimizer)
            finally:
                now = [p for g in optimizer.param_groups for p in g["params"]]
                assert all(a is b for a, b in zip(now, kept, strict=True)), "as it was"
    with told("variable"), accelerator() as acc:
        os.environ["MFSDP_OPTIONS"] = "prefetch=2"
        acc.prepare(Model())
    with accelerator(plugin=BLOCKS) as acc:
        with told("inductor"):
            acc.prepare(torch.compile(Model(), backend="inductor"))
        with told("in place"):
            model = Model()
            model.compile(backend="inductor")
            acc.prepare(model)
        with told("torch's"):
            acc.prepare(fully_shard(Model()))
        with told("ddp"):
            acc.prepare(nn.parallel.DistributedDataParallel(Model()))
        with told("late"):
            model = Model()
            optimizer = adamw(model)
            acc.prepare(model)
        late = acc.prepare(Model())
        with told("not its own"):
            acc.prepare(optimizer)
        with told("more"):
            model = Model()
            acc.prepare(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=1.0))
        with told("stepped"):
            model = Model()
            optimizer = adamw(model)
            model(data(1)[0]).backward()
            optimizer.step()
            acc.prepare(model, optimizer)
        with told("two"):
            acc.prepare(Model(), Model(), optimizer)
        assert len(acc._optimizers) == 0 and acc._models == [late], "what was refused is not kept"
    with environment():
        acc = accelerate.Accelerator(cpu=True)
        for name, prepare in (("without", acc.prepare), ("without, alone", acc.prepare_model)):
            with told(name):
                prepare(mfsdp.fully_shard(Model()))
    return said


@pytest.mark.dist
def test_what_cannot_be_right_is_refused(ranks):
    wanted = {
        "version": "set fsdp_version to 2", "no cpu": "Accelerator(cpu=True)", "backend": "leave out torch_compile",
        "plugin's option": "prefech", "dynamo": "leave out torch_compile", "fp16": "choose 'bf16'",
        "offload": "offloading is not supported", "policy": "sharding={'units'", "no blocks": "names no module",
        "offloaded": "activation_checkpointing is", "argument": "strategy", "variable": "object in JSON",
        "inductor": "compiled by 'inductor'", "in place": "compiled by 'inductor'", "ddp": "model.module",
        "late": "Give both to one call", "not its own": "in no prepared model", "more": "has to be a part of the model",
        "stepped": "before the first step", "two": "Only one model", "without": "fsdp_version=2",
        "without, alone": "fsdp_version=2", "fp8": "gathered in FP8 by themselves",
        "cp": "with cp is not supported", "torch's": "leave that out, or call mfsdp.fully_shard",
    }  # fmt: skip
    for said in ranks.run(refused):
        missing = {name: said[name] for name, words in wanted.items() if words not in said[name]}
        assert not missing and said.keys() == wanted.keys(), missing


PROGRAM = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
more = {} if sys.argv[1:] else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
accelerator = Accelerator(**more)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
names = [c.__name__ for c in type(model).__mro__[:2]]
sys.stdout.write(f"{__name__} {sys.argv[1:]} {names} {accelerator.distributed_type}\\n")
"""


def launched(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    Path(folder, "program.py").write_text(PROGRAM)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    more = {"PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "MFSDP_OPTIONS": json.dumps(EAGER)}
    more |= {"MFSDP_SHARDING": '{"strategy": "optim"}', "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **more})


@pytest.mark.dist
@pytest.mark.slow
def test_a_program_that_knows_nothing_of_it(tmp_path):
    """Started as Accelerate's users do, on two processes."""
    launch = ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"]
    launch += ["--main_process_port", "0", "-m", "mfsdp.launch", "-m", "program", "--flag"]
    out = launched(tmp_path, *launch)
    line = "__main__ ['--flag'] ['Sequential', 'FSDPModule'] DistributedType.FSDP"
    assert out.stdout.count(line) == 2, out.stderr[-3000:]


@pytest.mark.slow
def test_one_process_without_a_group(tmp_path):
    """It trains, and says that nothing is sharded."""
    out = launched(tmp_path, "mfsdp.launch", str(tmp_path / "program.py"))
    assert "__main__ [] ['Sequential', 'Module'] DistributedType.NO" in out.stdout, out.stderr[-3000:]
    assert "neither sharded nor compiled" in out.stderr


def test_launch_says_how_it_is_called(tmp_path):
    from mfsdp import launch

    for arguments, words in (([], "usage"), (["-m"], "usage"), (["--flag"], "usage"), (["nowhere.py"], "no file")):
        with pytest.raises(SystemExit, match=words):
            launch.main(arguments)
