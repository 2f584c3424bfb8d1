"""docs/from_megatron_fsdp.md: every name of Megatron-FSDP is on it, every name of ours is there, its code runs."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.buffers.sharding_plan import STRATEGIES, strategy_name
from mfsdp.config.options import Options
from tests.helpers.models import MLP
from tests.helpers.parity import averaged, error

PAGE = Path(__file__).parent.parent / "docs" / "from_megatron_fsdp.md"
VERSION = "0.6.1"

# Names of the package at that version, by section of the page.
MODEL = """
    module optimizer device_mesh dp_shard_dim dp_outer_dim tp_dim hybrid_fsdp_group hybrid_fsdp_expt_group
    expt_device_mesh fsdp_group_ag expt_fsdp_group_ag fsdp_unit_modules zero_dp_strategy outer_dp_sharding_strategy
    device init_model_with_meta_device mixed_precision_policy overlap_grad_reduce overlap_param_gather
    sync_model_each_microbatch preproc_state_dict_for_dcp_ckpt report_nan_in_param_grad average_in_collective
    disable_bucketing calculate_per_token_loss keep_fp8_transpose_cache nccl_ub fsdp_double_buffer
    fsdp_db_use_persist_buf_on_alloc_fail disable_symmetric_registration enable_fine_grained_param_gather
    use_decoupled_grad cuda_graph_mode maxpool_double_buffer dist_index ddp_config
    enable_fine_grained_param_gather_hook enable_fine_grained_param_gather_backward_hook
    fine_grained_recurse_module_types
"""
POLICY = "main_params_dtype main_grads_dtype grad_comm_dtype"
OPTIMIZER = """
    optimizer preproc_state_dict_for_dcp_ckpt sync_grad_before_optimizer_step install_optimized_model_weights
    zero_grad_buffer
"""
METHODS = """
    all_gather_and_wait_parameters_ready no_sync sync set_model_auto_sync get_distributed_index mixed_precision_context
    reset_mixed_precision_policy start_param_sync start_grad_sync synchronize_param_gather synchronize_gradient_reduce
    attach_grad_to_optimizer_state finish_grad_sync scale_gradients zero_grad_buffer install_optimized_model_weights
    broadcast_params forward
"""
ATTRIBUTES = """
    module model_auto_sync is_last_microbatch microbatch_count pre_backward post_backward post_forward_release_module
    post_backward_release_module param_to_name raw_param param_and_grad_buffer
"""
BUFFER = """
    get_mem_alloc_context manual_buffer_registration scale_gradients zero_grad update_main_grads num_buckets
    copy_main_weights_to_model_weights all_gather_parameters reduce_scatter_gradients all_reduce_gradients
"""
BUFFER_ATTRIBUTES = "optimizer_named_parameters _log_parameter_groups"
INDEX = """
    device_mesh dp_shard_dim dp_outer_dim tp_dim hybrid_fsdp_group hybrid_fsdp_expt_group hsdp_outer_dp_shard
    expt_device_mesh fsdp_group_ag expt_fsdp_group_ag get_submesh get_dp_group get_fsdp_group get_outer_fsdp_group
    get_root_mesh get_logical_hybrid_fsdp_rank
"""
CONFIG = """
    overlap_grad_reduce overlap_param_gather check_for_nan_in_grad bucket_size average_in_collective fp8_param_gather
    data_parallel_sharding_strategy gradient_reduce_div_fusion suggested_communication_unit_size
    keep_fp8_transpose_cache nccl_ub fsdp_double_buffer fsdp_all_gather_in_start_param_sync
    fsdp_db_use_persist_buf_on_alloc_fail outer_dp_sharding_strategy disable_symmetric_registration
    fsdp_manual_registration megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype
    megatron_fsdp_grad_comm_dtype megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
"""
UNEVEN = """
    gather_and_compute_chunk_metadata update_uneven_dtensor_chunk_metadata validate_uneven_dtensor
    filter_unflattened_state_dict get_unflattened_state_dict preprocess_state_dict_for_uneven_dtensor
    uneven_dtensor_to_full_tensor redistribute_uneven_dtensor_to_replicated gather_uneven_dtensor_to_full_tensor
    split_dtensor
"""
EXPERIMENTAL = """
    module mesh placements mixed_precision_policy use_symm_mem microbatch precision_aware DBuffer Placements Placement
    Flat Partial Replicate
"""
NAMES = {
    "Arguments: `fully_shard_model`, `fully_shard`, `MegatronFSDP`": MODEL,
    "`MixedPrecisionPolicy`": POLICY,
    "The optimizer: `fully_shard_optimizer`": OPTIMIZER,
    "Methods and attributes of `MegatronFSDP`": METHODS + ATTRIBUTES,
    "`ParamAndGradBuffer`": BUFFER + BUFFER_ATTRIBUTES,
    "`FSDPDistributedIndex`": INDEX,
    "`DistributedDataParallelConfig`": CONFIG,
    "`megatron_fsdp.uneven_dtensor`": UNEVEN,
    "`megatron_fsdp.experimental`": EXPERIMENTAL,
}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> Iterator[list[str]]:
    """Cells of its tables, without heads."""
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        if line.startswith("|") and not line.startswith("|--") and cells[0] not in ("there", "|"):
            yield cells


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# What is theirs


@pytest.mark.parametrize("section", NAMES)
def test_every_name_of_theirs_is_a_row(section):
    found: list[str] = []
    for cells in rows(sections()[section]):
        assert len(cells) == 2 and cells[1], cells
        found += [re.sub(r"\w+\((\w+)=\)", r"\1", span) for span in spans(cells[0])]
    assert sorted(found) == sorted(NAMES[section].split())


def test_the_names_are_those_of_the_package():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = pytest.importorskip("megatron_fsdp")
        from megatron_fsdp import experimental, param_and_grad_buffer, uneven_dtensor
        from megatron_fsdp.experimental import optimizer
    if theirs.__version__ != VERSION:
        pytest.skip(f"megatron-fsdp {theirs.__version__} is installed, the page is about {VERSION}")

    def arguments(*functions: Any) -> set[str]:
        return {n for f in functions for n in inspect.signature(f).parameters} - {"self"}

    def public(owner: Any, kind: Any = object) -> set[str]:
        return {n for n, value in vars(owner).items() if not n.startswith("_") and isinstance(value, kind)}

    def stored(owner: type) -> set[str]:
        """Attributes that its module assigns to."""
        tree = ast.parse(inspect.getsource(inspect.getmodule(owner)))  # type: ignore[arg-type]
        return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}

    model, function = theirs.MegatronFSDP, type(lambda: None)
    assert arguments(theirs.fully_shard_model, theirs.fully_shard, model.__init__) == set(MODEL.split())
    assert arguments(theirs.MixedPrecisionPolicy) == set(POLICY.split())
    body = ast.walk(ast.parse(inspect.getsource(theirs.fully_shard_optimizer)))
    calls = [n for n in body if isinstance(n, ast.Call) and "updated_function_signature" in ast.unparse(n.func)]
    added = {k.arg for n in calls for k in n.keywords}  # what `step` and `zero_grad` take besides
    assert arguments(theirs.fully_shard_optimizer) | added == set(OPTIMIZER.split())
    assert public(model, function) == set(METHODS.split())
    assert set(ATTRIBUTES.split()) <= stored(model)
    buffer = param_and_grad_buffer.ParamAndGradBuffer
    assert public(buffer) == set(BUFFER.split())
    assert set(BUFFER_ATTRIBUTES.split()) <= stored(buffer) | set(vars(buffer))
    index = theirs.FSDPDistributedIndex
    assert arguments(index) | public(index) == set(INDEX.split())
    assert arguments(theirs.DistributedDataParallelConfig) == set(CONFIG.split())
    mine = {n for n in public(uneven_dtensor, function) if getattr(uneven_dtensor, n).__module__.endswith("dtensor")}
    assert mine == set(UNEVEN.split())
    of_optimizer = arguments(optimizer.fully_shard_optimizer) - {"optimizer"}
    exported = set(experimental.__all__) - {"fully_shard", "fully_shard_optimizer"}
    assert arguments(experimental.fully_shard) | of_optimizer | exported == set(EXPERIMENTAL.split())


# What is ours

WORDS = {
    *("Block", "experts", "init", "x", "a", "b", "folder"),
    *(*STRATEGIES, *(f.name for f in fields(Options)), *inspect.signature(mfsdp.MixedPrecisionPolicy).parameters),
}
"""Names on the right that stand for something of the reader's, strategies, options, roles."""


def written_for_ours() -> list[str]:
    tables = [text for name, text in sections().items() if name != "Change one import"]  # `test_megatron_door`
    found = {s: None for text in tables for cells in rows(text) for s in spans(cells[-1])}
    prose = re.sub(r"```.*?```|^\|.*?$", "", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return list(found | {s: None for s in spans(prose) if s.startswith("mfsdp.")})


def look_up(span: str, objects: dict[str, Any]) -> None:
    """Raises if a name in it is not there, a call does not fit, or an option or a policy is refused."""
    sharding = inspect.signature(mfsdp.fully_shard).parameters
    if span.endswith("="):
        assert span[:-1] in {"options", *sharding}
        return
    for node in ast.walk(ast.parse(span)):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            _object(node, objects)
        elif isinstance(node, ast.Call):
            called, given = _object(node.func, objects), {str(k.arg): k.value for k in node.keywords}
            if called is not None and not inspect.isbuiltin(called):
                inspect.signature(called).bind(*node.args, **given)
            if called is mfsdp.MixedPrecisionPolicy:
                eval(ast.unparse(node), objects)
            if isinstance(given.get("strategy"), ast.Constant):
                strategy_name(given["strategy"].value)
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            assert name in {"options", "MFSDP_DUMP", *sharding}, f"what is {name}=?"
            if name == "options":
                options = eval(ast.unparse(node.value), {})
                Options.parse(options)
            elif span == 'units="auto"':
                mfsdp.fully_shard(MLP(), units="auto")


def _object(node: ast.AST, objects: dict[str, Any]) -> Any:
    """What is behind a dotted name; ``None`` where only running it would tell."""
    if isinstance(node, ast.Name):
        assert node.id in WORDS | set(objects), f"what is {node.id}?"
        return objects.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _object(node.value, objects)
        return None if owner is None else getattr(owner, node.attr)
    return None


def known() -> dict[str, Any]:
    model = mfsdp.fully_shard(MLP())
    param = next(model.parameters())
    param.grad = torch.zeros_like(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {"mfsdp": mfsdp, "torch": torch, "mesh": DeviceMesh, "print": print,
            "TypeError": TypeError, "model": model, "param": param, "optimizer": optimizer}  # fmt: skip


def test_every_name_of_ours_is_there():
    objects, faults = known(), []
    there = written_for_ours()
    for span in there:
        try:
            look_up(span, objects)
        except (AssertionError, AttributeError, TypeError, ValueError, SyntaxError) as error:
            faults.append(f"`{span}`: {error}")
    assert not faults, "\n".join(faults)
    assert len(there) > 60


@pytest.mark.parametrize("span", [
    "mfsdp.polo(model)", "mfsdp.fully_shard(model, polo=1)", "model.polo()", "polo", 'options={"polo": 1}', "polo=",
    "polo=3", 'mfsdp.fully_shard(model, strategy="polo")', "mfsdp.no_sync()",
    "mfsdp.MixedPrecisionPolicy(compute_dtype=torch.int8)",
])  # fmt: skip
def test_names_that_are_not_there_are_found(span):
    with pytest.raises((AssertionError, AttributeError, TypeError, ValueError)):
        look_up(span, known())


def test_what_the_page_says_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'zero_dp_strategy'"):
        mfsdp.fully_shard(MLP(), zero_dp_strategy=3)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="build the optimizer after fully_shard"):
        mfsdp.fully_shard(model)
    assert optimizer

    class Theirs:
        main_params_dtype = torch.float32

    with pytest.raises(ValueError, match=r"give a mfsdp.MixedPrecisionPolicy, or torch\.distributed"):
        mfsdp.fully_shard(MLP(), mp_policy=Theirs())
    with pytest.raises(ValueError, match="outer_strategy=1: choose one of"):
        mfsdp.fully_shard(MLP(), outer_strategy=1)
    run = torch.compile(mfsdp.fully_shard(MLP()), backend="mfsdp", mode="max-autotune")
    with pytest.raises(Exception, match="does not support mode='max-autotune'"):
        run(torch.ones(1, 24))


def test_what_the_page_says_of_values():
    """Dtypes, scaled gradients, module buffers, units inside of units, and the unit table."""
    bf16, f32 = torch.bfloat16, torch.float32
    assert mfsdp.MixedPrecisionPolicy().resolve(bf16).grad is f32
    assert mfsdp.MixedPrecisionPolicy(main_grads_dtype=bf16).resolve(bf16).grad is bf16
    assert mfsdp.MixedPrecisionPolicy(main_params_dtype=bf16).resolve(f32).main is f32
    for policy in (mfsdp.MixedPrecisionPolicy(), mfsdp.MixedPrecisionPolicy(main_grads_dtype=bf16)):
        model = mfsdp.fully_shard(nn.Linear(3, 3), mp_policy=policy)
        optimizer = mfsdp.fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.state_dict()["weight"].full_tensor().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(torch.ones(1, 3)).sum().backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        optimizer.step()
        assert torch.allclose(before - model.state_dict()["weight"].full_tensor(), torch.tensor(0.5))
    normed = mfsdp.fully_shard(nn.BatchNorm1d(2), device="meta")
    assert next(normed.parameters()).is_meta and not normed.running_mean.is_meta
    nested = mfsdp.fully_shard(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), units=[nn.Sequential, nn.Linear])
    assert sum(isinstance(m, mfsdp.FSDPModule) for m in nested.modules()) == 3
    assert "; unit" in str(mfsdp.explain(MLP(), (torch.ones(1, 24),), suggest=False))


# Its code


def blocks(section: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", sections()[section], re.DOTALL)


def small() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(32, 2, 1, 1, 64, dropout=0.0)


def the_pages_code(folder: str, lowering: str) -> dict[str, float]:
    """Largest errors: of losses, of what was loaded, of what was taken over from a checkpoint like theirs."""
    _, code = blocks("Quick start")
    (migration,) = blocks("Checkpoints")
    if lowering != "inductor":
        code = code.replace('backend="mfsdp"', f'backend="mfsdp", options={{"lowering": "{lowering}"}}')
    home = os.getcwd()
    os.chdir(folder)
    try:
        page: dict[str, Any] = {}
        with patch.object(dist, "init_process_group"):
            exec(compile(code, str(PAGE), "exec"), page)
        reference = small()
        optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())
        worst = {"loss": 0.0, "weights": 0.0, "loaded": 0.0, "migrated": 0.0}
        for mine in page["losses"]:
            inp, tgt = torch.randn(1, 8, 32), torch.randn(1, 8, 32)
            loss = nn.functional.mse_loss(reference(inp, inp), tgt)
            loss.backward()
            averaged(reference)
            optimizer.step()
            optimizer.zero_grad()
            worst["loss"] = max(worst["loss"], abs(mine - loss.item()))
        worst["weights"] = difference(page["model"], reference)
        trained = copy.deepcopy(page["model"].state_dict())
        with torch.no_grad():
            for p in page["model"].parameters():
                p.zero_()
        exec(compile(code[code.index("\nstate = ") :], str(PAGE), "exec"), page)
        now = page["model"].state_dict()
        worst["loaded"] = max(error(now[n].full_tensor(), v.full_tensor()) for n, v in trained.items())
        if dist.get_rank() == 0:
            wrapped = nn.ModuleDict({"module": reference})
            theirs = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save(theirs, checkpoint_id="theirs", no_dist=True)
        dist.barrier()
        page["model"] = mfsdp.fully_shard(small(), units=[nn.TransformerEncoder, nn.TransformerDecoder])
        fresh = torch.optim.AdamW(page["model"].parameters(), lr=0.01)
        page["optimizer"] = mfsdp.fully_shard_optimizer(fresh)
        exec(compile(migration, str(PAGE), "exec"), page)
        worst["migrated"] = difference(page["model"], reference)
        for p, q in zip(page["model"].parameters(), reference.parameters(), strict=True):
            for key, value in optimizer.state[q].items():
                got = page["optimizer"].state[p][key]
                got = got if key == "step" else got.full_tensor()
                worst["migrated"] = max(worst["migrated"], error(got, value))
        return worst
    finally:
        os.chdir(home)


def difference(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((p.full_tensor() - q).abs().max().item() for p, q in pairs)  # type: ignore[attr-defined]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize(
    "lowering", ["eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.exhaustive])]
)
def test_the_pages_code_trains_as_the_unsharded_model(two_ranks, tmp_path, lowering):
    for worst in two_ranks.run(the_pages_code, str(tmp_path), lowering, timeout=400):
        assert worst["loss"] < 1e-6, worst
        # Biases of attention's keys have gradients of nothing but rounding, and Adam steps by them.
        assert worst["weights"] < 1e-4 or lowering == "inductor", worst
        assert worst["loaded"] == worst["migrated"] == 0, worst


def test_their_code_is_python():
    ast.parse(blocks("Quick start")[0])
