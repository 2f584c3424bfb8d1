"""A case as a program: what the fuzzer runs on its ranks is the printed script, to the letter; torchrun runs it too."""

from __future__ import annotations

import ast
import inspect
import re

from tests.fuzz import parts
from tests.fuzz.cases import OPTIMIZERS, Case, bound, each

BUILT = {
    "linear": "nn.Linear({width}, {width}, bias={bias})",
    "layer_norm": "nn.LayerNorm({width})",
    "rms_norm": "nn.RMSNorm({width})",
    "mlp": "MLP({width}, {hidden})",
    "convolution": "Convolution({width}, {hidden})",
    "image": "Image({hidden})",
    "batch_norm": "BatchNorm({width})",
    "places": "Places({length}, {width})",
    "attention": "Attention({width}, 2)",
    "experts": "Experts({width}, {hidden})",
    "mixture": "Mixture({width}, {hidden})",
    "scale": "Scale({width})",
    "lora": "LoRA({width}, {hidden})",
    "weight_norm": "WeightNorm({width})",
    "recurrent": "Recurrent({width})",
    "reader": "Reader({width})",
    "views": "Views({width})",
    "hole": "Hole({width})",
    "codebook": "Codebook({width})",
    "clamped": "Clamped({width})",
    "renormed": "Renormed({length}, {width})",
    "sparse": "Sparse({length}, {width})",
    "subclass": "Subclass({width})",
    "own": "Own({width})",
    "differs": 'Differs({width}, "{how}")',
}
"""How a block is constructed, by kind; fields are those of the block and the case."""

TIED = {"linear": "weight", "attention": "qkv.weight"}

IMPORTS = {
    "contextlib": "contextlib.",
    "copy": "copy.",
    "os": "os.",
    "tempfile": "tempfile.",
    "time": "time.",
    "warnings": "warnings.",
    "from typing import Any": "Any",
    "torch": "torch.",
    "torch.distributed as dist": "dist.",
    "torch.distributed.checkpoint as dcp": "dcp.",
    "torch.nn.functional as F": "F.",
    "from torch import nn": "nn.",
    "from torch.distributed.device_mesh import init_device_mesh": "init_device_mesh",
    "from torch.distributed.tensor import DTensor": "DTensor",
    "from torch.utils.checkpoint import checkpoint": "checkpoint(",
    "mfsdp": "mfsdp.",
}
"""What a program may import, and how one sees that it has to."""


def program(case: Case, found: str = "") -> str:
    """The text of a case's program. ``main()`` gives a list of what is wrong; run as a script it ends with that."""
    body = "\n\n\n".join([*_wire(case), *_graphs(case), _main(case), _script()])
    text, used = body, set[str]()
    while more := {n for n in _PARTS if n not in used and re.search(rf"\b{n}\(", text)}:  # helpers use helpers
        used |= more
        text = "\n\n\n".join([*(_PARTS[n] for n in sorted(used)), body])
    imports = [i if i.startswith("from") else f"import {i}" for i, sign in IMPORTS.items() if sign in text]
    start = f"torchrun --nproc-per-node {case['world']}" if case["world"] > 1 else "python"
    said = "".join(f"\n{line}" for line in found.splitlines()[:6])
    return f'"""Seed {case["seed"]}: {start} THIS_FILE{said}\n"""\n\n' + "\n".join(imports) + "\n\n\n" + text + "\n"


def _parts() -> dict[str, str]:
    """The text of every class and function of ``parts.py``, by name."""
    text = inspect.getsource(parts)
    lines, out = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            out[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return out


_PARTS = _parts()


# The model


def _graphs(case: Case) -> list[str]:
    """The model's class, and one for each nest, inner ones first."""
    out = [_graph(b["name"].capitalize(), b["blocks"], case, root=False) for b in case["blocks"] if "blocks" in b]
    return [*out, _graph("Model", case["blocks"], case, root=True)]


def _graph(name: str, blocks: list[Case], case: Case, *, root: bool) -> str:
    made, calls = [], []
    if root:
        made.append(
            f"self.first = nn.Embedding(11, {case['width']})"
            if case["input"] == "tokens"
            else f"self.first = nn.Linear(3, {case['width']})"
        )
        calls += ["x = self.first(x)", *_tripping(case, "first", "x")]
    made += [_made(b, case) for b in blocks if b["kind"] != "again"]
    if root:
        made.append(f"self.head = nn.Linear({case['width']}, 11)")
        if case.get("tied_head") and case["input"] == "tokens":
            made.append("self.head.weight = self.first.weight")
    for b in blocks:
        if "tie" in b and b["kind"] in TIED:
            made.append(f"self.{b['name']}.{TIED[b['kind']]} = self.{b['tie']}.{TIED[b['kind']]}")
    for b in blocks:
        if b.get("frozen") == "first":
            made.append(f"next(self.{b['name']}.parameters()).requires_grad_(False)")
        elif b.get("frozen"):
            made.append(f"self.{b['name']}.requires_grad_(False)")
    now, known = "x", {b["name"]: b for b in blocks}
    for b in blocks:
        if b.get("idle"):
            continue
        before = b["from"] if "from" in b and not known[b["from"]].get("idle") else now
        calls += _call(b, before, known)
        now = b["name"]
        calls += _tripping(case, now, now) if root else []
    value = f"self.head({now})" if root else now
    if root and "returned" in case:
        value += f", {case['returned']}"
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in made]
    lines += ["", "    def forward(self, x):"] + [f"        {line}" for line in [*calls, f"return {value}"]]
    return "\n".join(lines)


def _made(block: Case, case: Case) -> str:
    kind = block["kind"]
    text = f"{block['name'].capitalize()}()" if "blocks" in block else BUILT[kind].format(**{**case, **block})
    return f"self.{block['name']} = {text}" + (f".to(torch.{block['dtype']})" if "dtype" in block else "")


def _call(block: Case, x: str, known: dict[str, Case]) -> list[str]:
    """The lines of forward that call a block."""
    name, lines = block["name"], []
    target = known[block["of"]] if block["kind"] == "again" else block
    for _ in range(block.get("calls", 1)):
        given = f"{x}.to(torch.{target['dtype']})" if "dtype" in target else x
        module, wrap = f"self.{target['name']}", block.get("wrap")
        if wrap == "break":
            lines.append("torch._dynamo.graph_break()")
        value = {
            "checkpoint": f"checkpoint({module}, {given}, use_reentrant=False)",
            "reentrant": f"checkpoint({module}, {given}, use_reentrant=True)",
            "uncompiled": f"uncompiled({module}, {given})",
        }.get(wrap or "", f"{module}({given})")
        value += f".to({x}.dtype)" if "dtype" in target else ""
        lines.append(f"{name} = {x} + {value}" if block.get("residual") else f"{name} = {value}")
        x = name
    return lines


# Around it


def _main(case: Case) -> str:
    lines = ["faults = []"]
    if case["world"] > 1:
        lines += ["rank, world = dist.get_rank(), dist.get_world_size()"]
    else:
        lines += ["rank, world = 0, 1"]
    lines += ["warnings.simplefilter('ignore')", "warnings.filterwarnings('error', 'mfsdp: nothing has initialised')"]
    lines += [f"torch.set_default_dtype(torch.{case['dtype']})"]
    lines += [*_built(case), *_sharded(case), *_ready(case), *_steps(case)]
    if case["steps"] > 0:
        lines += [f"values(faults, 'in the end', model, reference, {bound(case)})"]
    lines += ["return faults"]
    return "def main():\n" + "\n".join(f"    {line}" for line in lines)


def _built(case: Case) -> list[str]:
    lines = ["torch.manual_seed(0)", "reference = Model()"]
    if not case.get("meta"):
        return [*lines, "model = copy.deepcopy(reference)"]
    lines += ["with torch.device('meta'):", "    model = Model()", "torch.manual_seed(0)"]
    if "partly_meta" in case:
        name = case["partly_meta"]
        lines += [f"name, p = list(reference.{name}.named_parameters(prefix='{name}'))[-1]"]
        lines += ["p.data.fill_(0.25)", "place, _, last = name.rpartition('.')"]
        lines += ["setattr(model.get_submodule(place), last, nn.Parameter(p.detach().clone(), p.requires_grad))"]
    return lines


def _sharded(case: Case) -> list[str]:
    lines, given = [], {"strategy": str(case["strategy"])}
    if case.get("control"):
        return []
    if "mesh" in case:
        shape, names = case["mesh"]["shape"], case["mesh"]["names"]
        named = "" if names is None else f", mesh_dim_names={tuple(names)!r}"
        lines.append(f"mesh = init_device_mesh('cpu', {tuple(shape)}{named})")
        given["mesh"] = "mesh"
        if "outer_strategy" in case:
            given["outer_strategy"] = repr(case["outer_strategy"])
    if "reshard_after_forward" in case:
        given["reshard_after_forward"] = "False"
    if "policy" in case:
        policy = ", ".join(f"{k}=torch.{v}" for k, v in case["policy"].items())
        given["mp_policy"] = f"mfsdp.MixedPrecisionPolicy({policy})"

    def call(module: str, **more: str) -> str:
        return f"mfsdp.fully_shard({module}, " + ", ".join(f"{k}={v}" for k, v in {**given, **more}.items()) + ")"

    units = _units(case)
    if "calls" in case:
        turn = [case["strategy"], 3, 2, case["strategy"], 1, 0]
        for i, unit in enumerate(u for u in units if "*" not in u):
            mixed = {"strategy": str(turn[i % len(turn)])} if case["calls"] == "mixed" else {}
            lines.append(call(f"model.{unit}", **mixed))
        wild = [u for u in units if "*" in u]
        return [*lines, call("model", **({"units": repr(wild)} if wild else {}))]
    if "patterns" in case and case["blocks"]:
        units = [case["patterns"]]
    return [*lines, call("model", **({"units": repr(units)} if units else {}))]


def _units(case: Case) -> list[str]:
    """Names of modules that are units, inner ones first."""
    out = []

    def walk(blocks: list[Case], prefix: str) -> None:
        for b in blocks:
            walk(b.get("blocks", []), f"{prefix}{b['name']}.")
            out.extend(f"{prefix}{b['name']}.{inner}" for inner in b.get("inner", []))
            if b.get("unit"):
                out.append(f"{prefix}{b['name']}")

    walk(case["blocks"], "")
    return list(dict.fromkeys(out))


def _ready(case: Case) -> list[str]:
    """What happens between sharding and the first step."""
    lines = []
    if "partly_meta" in case:
        lines += ["same(faults, 'at first', model.get_parameter(name), p, 0)"]
        lines += ["with torch.no_grad():", "    for p, q in zip(model.parameters(), reference.parameters()):"]
        lines += ["        q.copy_(whole(p))"]
    elif case.get("meta"):
        lines += ["values(faults, 'at first', model, reference, 0)"]
    if any(b["kind"] == "differs" for b in each(case["blocks"])):
        lines += ["for module in [*model.modules(), *reference.modules()]:", "    if hasattr(module, 'rank'):"]
        lines += ["        module.rank = rank"]
    lowering = case.get("lowering", "eager")
    options = {"lowering": lowering, **case.get("options", {})}
    compiled = f"torch.compile(model, backend='mfsdp', dynamic=False, options={options!r})"
    if case.get("control"):
        compiled = "torch.compile(model, backend='aot_eager', dynamic=False)"
    lines += ["run = model" if lowering == "none" else f"run = {compiled}"]
    if case.get("fault", {}).get("where") == "hook":
        lines += ["hooked = next(p for p in model.parameters() if p.requires_grad)"]
        lines += ["hooked.register_hook(lambda g: trips(armed, 'hook'))"]
    fuse = case.get("fuse", "")
    more = f", {fuse}" if "=" in fuse else ""
    make = OPTIMIZERS[case["optimizer"]]
    ours, its = "model.parameters()", "reference.parameters()"
    if case.get("mixed"):
        lines += ["extra = {m: nn.Parameter(torch.ones(3)) for m in (model, reference)}"]
        ours, its = (f"[*{m}.parameters(), extra[{m}]]" for m in ("model", "reference"))
    lines += [f"optimizer = {make.format(ours, more)}"]
    lines += ["mfsdp.fully_shard_optimizer(optimizer)"] if fuse == "flat" else []
    lines += [f"theirs = {make.format(its, '')}"]
    if case.get("hook"):
        lines += ["for m in (model, reference):"]
        lines += ["    next(p for p in m.parameters() if p.requires_grad).register_hook(lambda g: 2 * g)"]
    if case.get("data"):
        lines += ["for m in (model, reference):", "    p = next(m.parameters())", "    p.data = p.data * 0.5"]
    return lines


def _steps(case: Case) -> list[str]:
    micro, limit = case.get("micro", 1), bound(case)
    lines = []
    if "toggle" in case:
        lines += ["if step > 0:", "    for m in (model, reference):"]
        lines += [f"        m.{case['toggle']}.requires_grad_(step == 2)"]
    backward = _backward(case, limit)
    if micro > 1 or "given_up" in case:
        lines += [f"for micro in range({micro}):"] + [f"    {line}" for line in backward]
        if "given_up" in case:
            lines += ["    if step == 0:  # given up half-way", "        break"]
            zero = {"optimizer": "optimizer.zero_grad()", "run": "run.zero_grad()", "model": "model.zero_grad()"}
            lines += ["if step == 0:", f"    {zero[case['given_up']]}", "    theirs.zero_grad()", "    continue"]
    else:
        lines += ["micro = 0", *backward]
    lines = _alone_in_step(case, lines)
    compared = ["averaged(reference, world)", f"if not gradients(faults, step, model, reference, {limit}):"]
    compared += ["    return faults or ['it runs away at once'] * (step == 0)"]
    if _what(case) == "swallowed" and case["fault"]["where"] in ("backward", "hook"):  # one rank would not come
        compared = [f"if step != {case['fault']['step']}:", *(f"    {line}" for line in compared)]
    lines += compared
    if case.get("clip"):
        lines += ["norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, reference)]"]
        lines += [f"same(faults, f'step {{step}}: norm', *norms, {limit})"]
    lines += [*_trips(case, "optimizer"), "optimizer.step()", "theirs.step()"]
    zero = {"zeros": "optimizer.zero_grad(set_to_none=False)", "model": "model.zero_grad()", "run": "run.zero_grad()"}
    way = case.get("zero", "optimizer")
    lines += [zero.get(way, "optimizer.zero_grad()")]
    lines += [f"theirs.zero_grad({'set_to_none=False' if way == 'zeros' else ''})"]
    if case.get("saved"):
        lines += ["if step == 0:", "    saved_and_loaded(model, optimizer, world)"]
    lines += _between(case, limit)
    if case.get("eval"):
        out = "[0]" if "returned" in case else ""
        lines += ["model.eval(), reference.eval()", "with torch.no_grad():"]
        lines += [f"    same(faults, f'step {{step}}: eval', run(x){out}, reference(y){out}, {limit})"]
        lines += ["model.train(), reference.train()"]
    return [f"for step in range({case['steps']}):"] + [f"    {line}" for line in _swallowed(case, lines)]


def _between(case: Case, limit: float) -> list[str]:
    """What is done to parameters behind a step."""
    lines = []
    if "written" in case:
        lines += [f"with torch.{case['under']}():", "    for m in (model, reference):"]
        lines += ["        for p in m.parameters():", f"            {case['written']}"]
    if "asked" in case:
        lines += ["named = dict(reference.named_parameters())", "for n, p in model.named_parameters():"]
        lines += ["    if p.numel():", f"        found, p = {case['asked']}, named[n]"]
        lines += [f"        same(faults, f'step {{step}}: asked of {{n}}', found, {case['asked']}, {limit})"]
    if case.get("mixed"):
        lines += [f"same(faults, f'step {{step}}: what is not sharded', extra[model], extra[reference], {limit})"]
    return lines


def _backward(case: Case, limit: float) -> list[str]:
    """One microbatch, forward and backward, of both models."""
    shape = f"({case['batch']}, {case['length']}"
    data = f"torch.randint(11, {shape}))" if case["input"] == "tokens" else f"torch.randn({shape}, 3))"
    lines = ["torch.manual_seed(1000 * step + 10 * micro + rank + 1)", f"x = y = {data}"]
    lines += [f"if {_strikes(case)}:", "    x.view(-1)[0] = float('nan')"] if _what(case) == "nan" else []
    compute = case.get("policy", {}).get("compute_dtype")
    if compute and case["input"] == "floats":
        lines += [f"x = x.to(torch.{compute})", "y = x.to(y.dtype)"]
    lines += _fault(case)
    if "functional" in case:
        lines += [f"for m, z in (({case['functional']}, x), (reference, y)):"]
        kind = f"torch.{compute or case['dtype']} if m is not reference else torch.{case['dtype']}"
        lines += [f"    zeros = {{n: torch.zeros(p.shape, dtype={kind}) for n, p in m.named_parameters()}}"]
        lines += ["    out = torch.func.functional_call(m, zeros, (z,))"]
        lines += ["    want = out if m is reference else None", "    mine = mine if m is reference else out"]
        lines += [f"same(faults, 'functional_call', mine, want, {limit})"]
    lines += [*_loss("run", "model", "x", "loss", case), *_loss("reference", "reference", "y", "want", case)]
    if "to_local" not in case.get("penalty", {}).get("of", ""):
        lines += [f"same(faults, f'step {{step}}: loss', loss, want, {limit})"]
    lines += _trips(case, "between")
    calls = ["loss.backward()", "want.backward()"]
    if case.get("retain"):
        calls = ["loss.backward(retain_graph=True)", "want.backward(retain_graph=True)", *calls]
    count, sync = case.get("micro", 1), case.get("sync")
    last = f"micro == {count - 1}"
    if sync == "flag":
        return [f"model.set_requires_gradient_sync({last})", *lines, *calls]
    if sync:
        hold = ", hold=True" if sync == "hold" else ""
        inside = [f"    {line}" for line in [*lines, *calls]]
        return [f"with contextlib.nullcontext() if {last} else mfsdp.no_sync(model{hold}):", *inside]
    return [*lines, *calls]


def _loss(call: str, model: str, x: str, name: str, case: Case) -> list[str]:
    out = "out, extra" if "returned" in case else "out"
    lines = [f"{out} = {call}({x})", f"{name} = (out.double() - 0.5).square().mean()"]
    if "returned" in case:
        lines += [f"{name} = {name} + whole(extra).double().square().mean()"]
    if case.get("mixed"):
        lines += [f"{name} = {name} + 0.1 * extra[{model}].square().sum().double()"]
    if "penalty" in case:
        of, over = case["penalty"]["of"], {"all": "", "first": "[:1]", "last": "[-1:]"}[case["penalty"]["over"]]
        lines += [f"for p in list({model}.parameters()){over}:", f"    {name} = {name} + 0.1 * whole({of}).double()"]
    return lines


# What goes wrong


def _what(case: Case) -> str:
    return case["fault"]["what"] if "fault" in case and not case.get("control") else ""


def _strikes(case: Case, micro: bool = True) -> str:
    """The condition under which a fault strikes."""
    fault = case["fault"]
    at = {key: fault[key] for key in ("step", "micro", "rank") if key in fault and (micro or key != "micro")}
    return " and ".join(f"{key} == {value}" for key, value in at.items())


def _fault(case: Case) -> list[str]:
    """What goes wrong in a microbatch, in front of it."""
    what, lines = _what(case), []
    if "where" in case.get("fault", {}):
        lines = [f"armed.append('{case['fault']['where']}')"]
    elif what == "late":
        lines = ["time.sleep(1.0)"]
    elif what == "evaluation":
        lines = ["model.eval()", "with torch.no_grad():", "    run(x)", "model.train()"]
    elif what == "full_tensor":
        lines = ["[whole(p) for p in model.parameters()]"]
    inside = [f"if {_strikes(case)}:", *(f"    {line}" for line in lines)] if lines else []
    return [*inside, *_trips(case, "loader")]


def _trips(case: Case, where: str) -> list[str]:
    """An exception of the program's own, in the loop."""
    return [f"trips(armed, '{where}')"] if case.get("fault", {}).get("where") == where else []


def _tripping(case: Case, behind: str, x: str) -> list[str]:
    """The same inside of the model, behind a block."""
    return [f"{x} = wire({x}, 'forward')"] if case.get("fault", {}).get("behind") == behind else []


def _wire(case: Case) -> list[str]:
    if "where" not in case.get("fault", {}):
        return []
    return ["armed = []" + ("\nwire = tripwire(armed)" if "behind" in case["fault"] else "")]


def _alone_in_step(case: Case, lines: list[str]) -> list[str]:
    """A step until gradients are averaged, which one rank leaves out, or keeps to itself."""
    if _what(case) == "left_out":
        return [f"if {_strikes(case, micro=False)}:", "    continue", *lines]
    if _what(case) != "no_sync":
        return lines
    return [
        f"alone = {_strikes(case, micro=False)}", "with mfsdp.no_sync(model) if alone else contextlib.nullcontext():",
        *(f"    {line}" for line in lines), "if alone:", "    continue",
        "[whole(p.grad) for p in model.parameters()]",  # otherwise they would wait in a collective of the program's own
    ]  # fmt: skip


def _swallowed(case: Case, lines: list[str]) -> list[str]:
    """A step that is given up where the program itself raises."""
    if not _what(case).startswith("swallowed"):
        return lines
    zero = ["except Fault:", "    optimizer.zero_grad()", "    theirs.zero_grad()"]
    return ["try:", *(f"    {line}" for line in lines), *zero]


def _script() -> str:
    lines = ["if __name__ == '__main__':", "    torch.set_num_threads(1)", "    if 'RANK' in os.environ:"]
    lines += ["        dist.init_process_group('gloo')", "    raise SystemExit('\\n'.join(main()) or print('right'))"]
    return "\n".join(lines)
