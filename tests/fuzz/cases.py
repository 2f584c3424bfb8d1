"""A case: a model, how it is sharded and how it trains, as plain data that a seed gives.

    {"seed": 7, "width": 6, ..., "blocks": [{"name": "b0", "kind": "mlp", "hidden": 5, "unit": True}, ...], "micro": 2}

What is not there is not done, so that a smaller case is one with a block or a key left out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]

ORDINARY = {
    "linear": ["weight"],
    "mlp": ["up", "down"],
    "convolution": ["inner", "back"],
    "image": ["inner", "norm"],
    "layer_norm": [],
    "rms_norm": [],
    "batch_norm": [],
    "places": ["table"],
    "attention": ["qkv", "out"],
    "experts": ["experts.*", "router"],
    "mixture": ["router"],
    "scale": [],
    "lora": ["base", "a"],
    "weight_norm": [],
    "reader": ["child"],
}
"""Kinds of blocks, and which modules inside of each can be units of their own."""

SELDOM = ("recurrent", "experts", "weight_norm", "batch_norm")
"""Dynamo breaks the graph there, or they are slow."""

WRITTEN = ("codebook", "clamped", "renormed")
EDGE_BLOCKS = ("hole", "sparse", "subclass", "own", "differs", *WRITTEN)

PENALTIES = (
    "p.square().sum()",
    "p.norm()",
    "p.abs().sum()",
    "p.exp().sum()",
    "((p - 0.5 * p.detach().clone()) ** 2).sum()",
    "(p * p).mean()",
    "torch.linalg.vector_norm(p)",
    "torch._foreach_norm([p])[0]",
    "whole(p).square().sum()",
    "(p.to_local() if hasattr(p, 'to_local') else p).square().sum()",
    "(out.mean() * whole(p).mean())",
)
"""Of one parameter ``p``, outside of forward; ``out`` is what forward gave."""

WRITTEN_BETWEEN = (
    "p.mul_(0.9)",
    "p.detach().mul_(0.9)",
    "p.copy_(p * 0.9)",
    "p.lerp_(torch.zeros_like(p), 0.1)",
    "p.data = p.data * 0.9",
    "torch._foreach_mul_([p], 0.9)",
    "rows(p).mul_(0.9)",
    "rows(p).data.mul_(0.9)",
    "rows(p.data).view(-1)[:].mul_(0.9)",
    "torch.mul(rows(p), 0.9, out=rows(p))",
    "torch._foreach_mul_([rows(p.detach())], 0.9)",
    "torch.from_dlpack(rows(p.detach())).mul_(0.9)",
    "rows(p.detach()).numpy().__imul__(0.9)",
)
"""What every rank does to each parameter ``p`` behind a step; ``rows`` are this rank's, as a plain tensor."""

ASKED_BETWEEN = (
    "p.detach().max()",
    "p.detach().abs().sum()",
    "p.detach().norm()",
    "p.detach().square().mean()",
    "(p.detach() > 0.1).any()",
    "p.detach().isfinite().all()",
    "(p.detach() * 2 - p.detach().clone()).clamp(-1, 1)",
)
"""What is computed with each parameter there."""

EDGES = (*EDGE_BLOCKS, "penalty", "returned", "retain", "functional", "data", "given_up", "partly_meta")
"""What must be right or refused in words; a case has one of them at most."""

TRAINED_ON = {
    "swallowed_by_all": ("forward", "between", "backward", "hook", "optimizer"),
    "late": (),
    "nan": (),
}
"""Faults after which training goes on, and its numbers are right; and where they may strike."""

APART = {
    "swallowed": ("forward", "between", "backward", "hook", "optimizer"),
    "ends": ("loader", "forward", "between", "backward", "hook", "optimizer"),
    "left_out": (),
    "no_sync": (),
    "evaluation": (),
    "full_tensor": (),
}
"""Faults of one rank that take it out of step: right where nobody would notice, and otherwise every rank is told."""

MESH_NAMES = (
    None,
    ("dp_outer", "dp_shard"),
    ("dp_replicate", "dp_shard"),
    ("replicate", "shard"),
    ("dp_replicate", "fsdp"),
    ("dp_replicate", "dp_shard_cp"),
    ("nodes", "gpus"),
    ("dp_shard", "cp"),
)

SYNC = ("no_sync", "hold", "flag")

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=0.05{})",
    "momentum": "torch.optim.SGD({}, lr=0.05, momentum=0.9{})",
    "adamw": "torch.optim.AdamW({}, lr=0.05, weight_decay=0.1, eps=1e-2{})",
    "rmsprop": "torch.optim.RMSprop({}, lr=0.01, eps=1e-2{})",
    "adagrad": "torch.optim.Adagrad({}, lr=0.05, eps=1e-2{})",
}
"""A large ``eps``: without it noise in a gradient of nothing becomes a step."""

POLICIES = (
    {"compute_dtype": "float32"},
    {"grad_comm_dtype": "float32"},
    {"param_comm_dtype": "float32"},
    {"main_params_dtype": "float64", "compute_dtype": "float32", "main_grads_dtype": "float64"},
    {"compute_dtype": "bfloat16"},
    {"grad_comm_dtype": "bfloat16"},
)


def draw(seed: int, ranks: int = 2) -> Case:
    """The case of a seed; on more ranks, if it is not for one."""
    case = _drawn(seed)
    if case["world"] == 2 and ranks > 2:
        case["world"] = ranks
        if "mesh" in case:
            case["mesh"]["shape"] = (2, ranks // 2)
    return case


def _drawn(seed: int) -> Case:
    r = random.Random(seed)
    case: Case = {
        "seed": seed, "world": 1 if r.random() < 0.12 else 2, "width": r.choice((4, 6, 8)), "length": r.choice((3, 5)),
        "batch": 2, "input": r.choice(("tokens", "floats")), "dtype": "float32" if r.random() < 0.3 else "float64",
        "steps": r.choice((1, 2, 3)), "blocks": [],
    }  # fmt: skip
    names = (f"b{i}" for i in range(100))
    case["blocks"] = [_block(r, case, names, depth=0) for _ in range(r.choice((1, 2, 2, 3, 3, 4)))]
    _relations(r, case)
    _sharding(r, case)
    _training(r, case)
    faults = random.Random(f"fault {seed}")
    if faults.random() < 0.1:
        _fault(faults, case)
    elif r.random() < 0.55:
        _edge(r, case, r.choice(EDGES), names)
    if "meta" in case:  # calls of their own draw in the order of the calls
        case.pop("calls", None)
    _between(random.Random(f"between {seed}"), case)
    _cut_inside(random.Random(-seed), case["blocks"])
    _no_batch_norm(case["blocks"], bool({"saved", "fault"} & case.keys()) or "compute_dtype" in case.get("policy", {}))
    if "meta" in case:  # what is drawn in another dtype is another number
        for block in each(case["blocks"]):
            block.pop("dtype", None)
    _no_experts(case["blocks"], "compute_dtype" in case.get("policy", {}))
    return case


def _between(r: random.Random, case: Case) -> None:
    """What people do between steps, and to parameters; nothing in cases that something goes wrong in."""
    written, asked, mixed, views = (r.random() < share for share in (0.15, 0.1, 0.1, 0.08))
    narrow = "bfloat16" in [*case.get("policy", {}).values(), *(b.get("dtype") for b in each(case["blocks"]))]
    if {"fault", "given_up", "partly_meta"} & case.keys():
        return
    if written:
        how = r.choice(WRITTEN_BETWEEN)
        case["written"] = how if not (narrow and "numpy" in how) else WRITTEN_BETWEEN[0]
        case["under"] = r.choice(("no_grad", "no_grad", "inference_mode"))
    if asked:
        case["asked"] = r.choice(ASKED_BETWEEN)
    if mixed and case.get("zero") not in ("model", "run"):
        case["mixed"] = True
    if views and not narrow and "meta" not in case:
        block = {"name": "views", "kind": "views", "residual": True}
        case["blocks"].insert(0, block | ({"unit": True} if r.random() < 0.5 else {}))


def _cut_inside(r: random.Random, blocks: list[Case]) -> None:
    """A graph break inside of what is checkpointed."""
    for block in blocks:
        if block["kind"] == "nest" and block.get("wrap") == "checkpoint" and r.random() < 0.5:
            block["blocks"][-1]["wrap"] = "break"


def _no_batch_norm(blocks: list[Case], never: bool) -> None:
    """Its buffers are of one rank (a checkpoint has those of one), are not cast, are written by a forward that is given
    up, and once more where activations are computed again, which AOTAutograd does not do.
    """
    for block in blocks:
        wrapped = never or block.get("wrap") in ("checkpoint", "reentrant")
        if block["kind"] == "batch_norm" and wrapped:
            block["kind"] = "layer_norm"
        _no_batch_norm(block.get("blocks", []), wrapped)


def _chosen(r: random.Random, case: Case) -> str:
    """The name of some block."""
    block = r.choice(case["blocks"])
    return block.get("of", block["name"])


def _no_experts(blocks: list[Case], narrow: bool) -> None:
    """Which expert a token goes to is another one in another dtype."""
    for block in blocks:
        if block["kind"] == "experts" and narrow:
            block["kind"] = "mixture"
            block.pop("inner", None)
        _no_experts(block.get("blocks", []), narrow)


def _block(r: random.Random, case: Case, names: Iterator[str], depth: int) -> Case:
    block: Case = {"name": next(names)}
    if depth == 0 and r.random() < 0.2:
        block["kind"] = "nest"
        block["blocks"] = [_block(r, case, names, 1) for _ in range(r.choice((1, 2)))]
        inner = [b["name"] for b in block["blocks"]]
    else:
        kind = r.choice(list(ORDINARY))
        if kind in SELDOM and r.random() < 0.5:
            kind = r.choice(SELDOM) if r.random() < 0.5 else "linear"
        block["kind"] = kind
        block |= _sizes(r, case, kind)
        inner = [n for n in ORDINARY.get(kind, []) if n != "weight"]
    if r.random() < 0.55:
        block["unit"] = True
    if inner and r.random() < 0.2:
        block["inner"] = [r.choice(inner)]
    if r.random() < 0.5:
        block["residual"] = True
    if r.random() < 0.3:
        block["wrap"] = r.choice(("checkpoint", "checkpoint", "reentrant", "uncompiled", "break"))
    if r.random() < 0.12:
        block["frozen"] = r.choice((True, "first"))
    if r.random() < 0.08:
        block["idle"] = True
    if r.random() < 0.1:
        block["calls"] = 2
    return block


def _sizes(r: random.Random, case: Case, kind: str) -> Case:
    if kind in ("mlp", "convolution", "image", "lora"):
        return {"hidden": r.choice((1, 2, 3, 5, 7, 13))}
    if kind == "experts":  # each number of tokens is compiled anew
        return {"hidden": r.choice((2, 3))}
    if kind == "mixture":
        return {"hidden": r.choice((2, 3, 5))}
    if kind == "linear":
        return {"bias": r.random() < 0.7}
    return {}


def _relations(r: random.Random, case: Case) -> None:
    """Skips in the graph, tied weights, modules called again later, dtypes of single blocks."""
    blocks = case["blocks"]
    for i, block in enumerate(blocks[1:], 1):
        if r.random() < 0.15:
            block["from"] = blocks[r.randrange(i)]["name"]
        alike = [
            b for b in blocks[:i] if b["kind"] == block["kind"] == "linear" or b["kind"] == block["kind"] == "attention"
        ]
        if alike and r.random() < 0.4:
            block["tie"] = r.choice(alike)["name"]
    if r.random() < 0.12:
        blocks.append({"name": "again", "kind": "again", "of": r.choice(blocks)["name"]})
    if case["input"] == "tokens" and r.random() < 0.3:
        case["tied_head"] = True
    if r.random() < 0.1:
        r.choice([b for b in blocks if b["kind"] != "again"])["dtype"] = r.choice(("float32", "bfloat16"))


def _sharding(r: random.Random, case: Case) -> None:
    case["strategy"] = r.choice((0, 1, 2, 3, 3))
    if case["world"] == 2 and r.random() < 0.3:
        names = r.choice(MESH_NAMES)
        case["mesh"] = {"shape": r.choice(((1, 2), (2, 1))), "names": names}
        if r.random() < 0.4 and names != ("dp_shard", "cp"):
            case["outer_strategy"] = "optim"
    if r.random() < 0.2:
        case["reshard_after_forward"] = False
    if r.random() < 0.3:
        case["calls"] = r.choice(("same", "mixed"))
    elif r.random() < 0.2:
        case["patterns"] = r.choice(("b*", "**.*"))
    if r.random() < 0.2:
        policy = dict(r.choice(POLICIES))
        if "compute_dtype" in policy:
            for block in each(case["blocks"]):
                block.pop("dtype", None)
        case["policy"] = policy
    if r.random() < 0.08:
        case["meta"] = True
        case["dtype"] = "float32"
    how = r.random()
    if how < 0.25:
        case["lowering"] = "none"
    elif how < 0.27:
        case["lowering"] = "inductor"
    for name, chosen in (
        ("prefetch", (0, 2, 3)),
        ("reduce_lag", (0, 2)),
        ("max_unsharded", (1, 900)),
        ("pool", (False,)),
    ):
        if r.random() < 0.15 and case.get("lowering") != "none":
            case.setdefault("options", {})[name] = r.choice(chosen)


def _training(r: random.Random, case: Case) -> None:
    narrow = bound(case) > 1e-2
    case["optimizer"] = "sgd" if narrow else r.choice(list(OPTIMIZERS))
    if r.random() < 0.3:
        case["fuse"] = r.choice(("foreach=True", "foreach=False", "fused=True", "flat"))
        if case["fuse"] == "fused=True" and case["optimizer"] == "rmsprop":
            case["fuse"] = "flat"
    if r.random() < 0.4:
        case["micro"] = r.choice((2, 3))
        if r.random() < 0.7:
            case["sync"] = r.choice(SYNC)
    if r.random() < 0.35:
        case["clip"] = True
    if r.random() < 0.4:
        case["zero"] = r.choice(("zeros", "model", "run"))
    if r.random() < 0.12:
        case["toggle"] = _chosen(r, case)
        case["steps"] = 3
    if r.random() < 0.06:
        case["saved"] = True
    if r.random() < 0.1:
        case["eval"] = True
    if r.random() < 0.08:
        case["hook"] = True


def _edge(r: random.Random, case: Case, edge: str, names: Iterator[str]) -> None:
    if edge in EDGE_BLOCKS:
        block: Case = {"name": next(names), "kind": edge}
        if edge == "differs":
            block["how"] = r.choice(("skip", "order", "branch"))
            block["inner"] = ["layers.*"]
            case["world"] = 2
        if r.random() < 0.4:
            block["unit"] = True
        case["blocks"].insert(r.randrange(len(case["blocks"]) + 1), block)
        case.pop("meta", None)
        if case["blocks"][-1]["kind"] == "again":  # stays behind what it calls
            case["blocks"].append(case["blocks"].pop())
    elif edge == "penalty":
        case["penalty"] = {"of": r.choice(PENALTIES), "over": r.choice(("all", "all", "first", "last"))}
    elif edge == "functional":
        case["functional"] = r.choice(("model", "run"))
    elif edge == "returned":
        case["returned"] = r.choice(("self.head.weight", "self.head.weight.T", "self.head.weight[0]"))
    elif edge == "given_up":
        case |= {"given_up": r.choice(("optimizer", "run", "model")), "micro": 2, "steps": 2}
        case["sync"] = r.choice(("no_sync", "hold", "flag"))
    elif edge == "partly_meta":
        case |= {"partly_meta": _chosen(r, case), "meta": True, "dtype": "float32"}
        for tied in each(case["blocks"]):
            tied.pop("tie", None)
    else:
        case[edge] = True


def _fault(r: random.Random, case: Case) -> None:
    """One thing goes wrong, in one microbatch, on one rank or on all."""
    what, where = r.choice([(what, where) for what, all in (TRAINED_ON | APART).items() for where in all or ("",)])
    case |= {"world": 2, "steps": 3}
    case.pop("saved", None)  # it communicates itself, and ranks that are out of step would meet there
    fault = {"what": what, "step": r.randrange(3), "micro": r.randrange(case.get("micro", 1))}
    if what == "swallowed":  # behind the last step nothing would tell that a rank has left out the optimizer's
        fault["step"] %= 2
    if what != "swallowed_by_all":
        fault["rank"] = r.randrange(2)
    if where:
        fault["where"] = where
    if where in ("forward", "backward"):
        fault["behind"] = r.choice(["first", *(b["name"] for b in case["blocks"] if not b.get("idle"))])
    if what == "no_sync":
        case.pop("sync", None)
    if what == "nan":
        case["input"] = "floats"
    case["fault"] = fault


def each(blocks: list[Case]) -> Iterator[Case]:
    """Blocks, and those inside of them."""
    for block in blocks:
        yield block
        yield from each(block.get("blocks", []))


def features(case: Case) -> list[str]:
    """What a case has, in words to count by and to look refusals up."""
    out = set()
    for key, value in case.items():
        if key in ("seed", "width", "length", "batch", "steps", "blocks", "micro", "input"):
            continue
        simple = isinstance(value, (str, int)) and not isinstance(value, bool)
        out.add(f"{key}:{value}" if simple and key not in ("toggle", "partly_meta") else key)
    out |= set(EDGES) & case.keys()
    if "mesh" in case:
        out.add(f"mesh:{','.join(case['mesh']['names'] or ('unnamed',))}")
    if "fault" in case:
        out |= {f"fault:{case['fault']['what']}", f"fault:{case['fault'].get('where', 'step')}"}
    if "penalty" in case:
        out.add(f"penalty:{case['penalty']['of']}")
    for block in each(case["blocks"]):
        out.add(block["kind"])
        out |= {k for k in ("inner", "frozen", "idle", "calls", "tie", "dtype", "from") if k in block}
        out |= {block[k] for k in ("wrap", "how") if k in block}
    if case.get("micro", 1) > 1:
        out.add("micro")
    return sorted(out)


BITS = {"float64": 1e-8, "float32": 3e-3, "bfloat16": 0.25}


def bound(case: Case) -> float:
    """The relative error that the narrowest dtype of a case explains."""
    kinds = [case["dtype"], *case.get("policy", {}).values()]
    kinds += [block["dtype"] for block in each(case["blocks"]) if "dtype" in block]
    return max(BITS[k] for k in kinds)


def control(case: Case) -> Case:
    """The case without us: unsharded, one process, compiled by ``aot_eager`` if at all. What fails there too is not
    ours.
    """
    gone = (
        "fault",
        "mesh",
        "outer_strategy",
        "sync",
        "given_up",
        "saved",
        "options",
        "policy",
        "calls",
        "fuse",
        "meta",
        "partly_meta",
    )
    return {**{k: v for k, v in case.items() if k not in gone}, "world": 1, "control": True}


# Smaller cases

NEEDED = {"seed", "world", "width", "length", "batch", "input", "dtype", "steps", "blocks", "strategy", "optimizer"}
SIMPLER = {
    "steps": (1, 2), "micro": (2,), "strategy": (3,), "optimizer": ("sgd",), "dtype": ("float64",), "world": (1,),
    "input": ("floats",), "length": (3,), "width": (4,), "batch": (1,),
}  # fmt: skip
"""Better values of what a case cannot do without, best first."""


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, or at first with many things less."""
    if _core(case) != case:
        yield _core(case)
    optional = case.keys() - NEEDED - set(EDGES) - {"fault"}
    for keys in ({"calls", "patterns", "mesh", "policy", "options"} & optional, optional):
        if len(keys) > 1:
            yield _changed(case, lambda c, keys=keys: [c.pop(k) for k in keys])
    for i in range(len(case["blocks"])) if len(case["blocks"]) > 2 else ():
        yield _changed(case, lambda c, i=i: c.update(blocks=[c["blocks"][i]]))
    yield from _fewer_blocks(case, [])
    for key in sorted(case.keys() - NEEDED):
        yield _changed(case, lambda c, key=key: c.pop(key))
        if isinstance(case[key], dict):
            for part in sorted(case[key]):
                if key in ("options", "policy") and len(case[key]) > 1:
                    yield _changed(case, lambda c, key=key, part=part: c[key].pop(part))
    for i, block in enumerate(each(case["blocks"])):
        for key in sorted(block.keys() - {"name", "kind", "how", "blocks", "hidden", "of", "bias"}):
            yield _changed(case, lambda c, i=i, key=key: list(each(c["blocks"]))[i].pop(key))
        if block["kind"] in ORDINARY and block["kind"] != "linear":
            yield _changed(case, lambda c, i=i: _to_linear(list(each(c["blocks"]))[i]))
    for key, values in SIMPLER.items():
        if key in case and case[key] in values:
            values = values[: values.index(case[key])]
        for value in values if key in case else ():
            yield _changed(case, lambda c, key=key, value=value: c.update({key: value}))


def _core(case: Case) -> Case:
    """What is at the edge or goes wrong, and nothing else."""
    kept = (
        NEEDED
        | set(EDGES)
        | {"lowering", "fault"}
        | ({"micro", "sync"} if {"given_up", "fault"} & case.keys() else set())
    )
    out = {key: value for key, value in case.items() if key in kept}
    out |= {"width": 4, "length": 3, "batch": 1, "input": "floats", "dtype": "float64", "optimizer": "sgd"}
    out["blocks"] = [b for b in case["blocks"] if b["kind"] in EDGE_BLOCKS]
    return out


def _fewer_blocks(case: Case, path: list[int]) -> Iterator[Case]:
    blocks = _at(case, path)
    for i in reversed(range(len(blocks))):
        yield _changed(case, lambda c, i=i: _at(c, path).pop(i))
        if "blocks" in blocks[i]:
            yield _changed(case, lambda c, i=i: _at(c, path).__setitem__(slice(i, i + 1), _at(c, path)[i]["blocks"]))
            yield from _fewer_blocks(case, [*path, i])


def _at(case: Case, path: list[int]) -> list[Case]:
    blocks = case["blocks"]
    for i in path:
        blocks = blocks[i]["blocks"]
    return blocks


def _to_linear(block: Case) -> None:
    for key in block.keys() - {"name", "unit", "residual", "wrap", "frozen", "idle", "calls", "from", "dtype"}:
        block.pop(key)
    block |= {"kind": "linear", "bias": False}


def _changed(case: Case, change: Callable[[Case], object]) -> Case:
    """A copy with a change, in which nothing refers to blocks that are gone."""
    out = copy.deepcopy(case)
    change(out)
    names: set[str] = set()
    kept = []
    for block in out["blocks"]:
        if block["kind"] == "again" and block["of"] not in names:
            continue
        for key in ("from", "tie"):
            if key in block and block[key] not in names:
                block.pop(key)
        names.add(block["name"])
        kept.append(block)
    out["blocks"] = kept
    if "written" not in out:
        out.pop("under", None)
    for key in ("toggle", "partly_meta"):
        if key in out and out[key] not in names:
            out.pop(key)
    for block in each(out["blocks"]):
        inside = [b["name"] for b in block.get("blocks", [])]
        if "blocks" in block and "inner" in block and not set(block["inner"]) <= set(inside):
            block.pop("inner")
    if out["world"] == 1:
        out.pop("mesh", None)
    return out


def minimised(case: Case, fails: Callable[[Case], bool], budget: int = 80) -> Case:
    """A case that fails still, and from which nothing more can be left out; or the best of ``budget`` tries.

    Args:
        case: one that fails.
        fails: whether a case fails in the same way.
        budget: how often to ask.
    """
    asked: set[str] = set()
    while True:
        for candidate in smaller(case):
            if repr(candidate) in asked:
                continue
            if budget == 0:
                return case
            budget -= 1
            asked.add(repr(candidate))
            if fails(candidate):
                case = candidate
                break
        else:
            return case
