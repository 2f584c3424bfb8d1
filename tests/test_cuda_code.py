"""Inductor's code for a GPU, written without one: operations in the listing's order, parameters read where they lie,
aligned pointers. What CPUs run is in `test_generated_code.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import mfsdp
from mfsdp.compiler import schedule_check
from mfsdp.ir.program import Phase
from mfsdp.ir.verifier import InvariantError
from tests.helpers.cuda_code import Place, Written, write
from tests.helpers.generated_code import launches, of_code, of_listing, uncommented
from tests.helpers.models import GPT, MLP, Block, Case, floats, llama, mixtral, tokens

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="what stands for a GPU here would hide a real one"),
]

bf16, f32 = torch.bfloat16, torch.float32
WIDE = Case(lambda: MLP(23, 1031), floats(32, 23), ["up"])
"""Rows so long and so odd that Inductor pads them, and an odd parameter before another."""


ONE_LLAMA = Case(lambda: llama(layers=1), tokens(67, 2, 9), ["LlamaDecoderLayer"])


def one_layer() -> torch.nn.Module:
    model: Any = mixtral()
    del model.model.layers[1:]
    return model  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Case, dict[str, Any]]] = {
    "gpt, fp32": (Case(lambda: GPT(layers=1), tokens(31, 2, 8), [Block]), {}),
    "llama, bf16": (ONE_LLAMA, {"compute_dtype": bf16, "grad_comm_dtype": bf16}),
    "mixtral, fp32 gradients": (Case(one_layer, tokens(67, 1, 5), ["MixtralDecoderLayer"]), {"compute_dtype": bf16}),
    "mlp, fp32 gathers": (WIDE, {"compute_dtype": bf16, "param_comm_dtype": f32, "grad_comm_dtype": bf16}),
}
LLAMA, MLP_ = "llama, bf16", "mlp, fp32 gathers"

models = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in ("gpt, fp32", "llama, bf16") else name
        for name in MODELS
    ],
)
phases = pytest.mark.parametrize("phase", ["forward", "backward"])


@cache
def programs(name: str) -> dict[Phase, Written]:
    case, policy = MODELS[name]
    return write(case, mfsdp.MixedPrecisionPolicy(**policy))


def calls(code: str) -> Iterator[tuple[str, list[str]]]:
    """What is called with which arguments, line by line."""
    found = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call)]
    for call in sorted(found, key=lambda n: n.lineno):
        yield ast.unparse(call.func), [ast.unparse(arg) for arg in call.args]


def reads(code: str) -> list[Place]:
    """What matrix products read of gathered buffers."""
    fulls, found = launches(code), []
    for name, args in calls(code):
        if re.fullmatch(r"extern_kernels\.(add|b)?mm|torch\.ops\.mfsdp\.mm\.default", name):
            for matrix in args[-2:]:
                view = re.fullmatch(r"reinterpret_tensor\((\w+), .*, (\d+)\)", matrix)
                full, offset = (view[1], int(view[2])) if view else (matrix, 0)
                found += [(fulls.index(full), offset)] if full in fulls else []
    return found


BYTES = {"*bf16": 2, "*fp32": 4}


def kernels(code: str) -> dict[str, tuple[dict[str, str], str]]:
    """Triton's kernels: types of their arguments, and their text. Private in torch (the form of the text); tried on
    2.13."""
    found = re.findall(r"(?ms)^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", code)
    return {name: (ast.literal_eval(re.search(r"'signature': (\{.*?\})", text)[1]), text) for name, text in found}  # type: ignore[index]


def gathered(code: str) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Every gathered buffer that a kernel of Triton's reads: the kernel, its name for the buffer, types and text."""
    fulls, made = launches(code), kernels(code)
    for called, args in calls(code):
        name = called.removesuffix(".run")
        if name in made:
            types, text = made[name]
            yield from ((name, mine, types, text) for mine, given in zip(types, args) if given in fulls)


def copies(code: str) -> list[str]:
    """Parameters that are copied: by an operator, or by a kernel that stores what it has loaded as it is (rows that
    an embedding looks up are no copy)."""
    found = re.findall(r"\b(?:aten|mfsdp)\.(?:copy_|clone|as_strided|slice|param)\b.*", uncommented(code))
    for name, pointer, types, text in gathered(code):
        loads = re.findall(rf"(tmp\d+) = tl\.load\({pointer} \+ \((.*?)\), ", text)
        stores = re.findall(r"tl\.store\((\w+) \+ \(.*?\), (tmp\d+), ", text)
        for value, where in loads:
            same = any(value == stored and types[to] == types[pointer] for to, stored in stores)
            if same and "tmp" not in where:
                found.append(f"{name}: {pointer} + {where}")
    return found


def unaligned(code: str) -> list[str]:
    """Pointers to numbers (not to indices) that Triton may not take for multiples of 16 bytes, and parameters and
    gradients that do not begin at one."""
    found = []
    for name, (types, text) in kernels(code).items():
        known = re.search(r"divisible_by_16=\((.*?)\)", text)  # without Triton
        aligned = re.findall(r"\d+", known[1]) if known else re.findall(r"\((\d+),\): \[\['tt.divisibility', 16", text)
        pointers = [(str(i), arg) for i, (arg, kind) in enumerate(types.items()) if kind in BYTES]
        found += [f"{name}: {arg}" for i, arg in pointers if i not in aligned]
    for name, pointer, types, text in gathered(code):
        offsets = re.findall(rf"tl\.load\({pointer} \+ \((\d+)(?: \+ .*?)?\), ", text)
        found += [f"{name}: {pointer} + {o}" for o in offsets if int(o) * BYTES[types[pointer]] % 16]
    found += [f"{place}" for place in reads(code) if place[1] % 8]
    products = [args for name, args in calls(code) if name == "torch.ops.mfsdp.mm.default"]
    return found + [f"product {args}" for args in products if int(args[1]) % 8]


def in_order(program: Written, code: str) -> bool:
    """Whether code does what the listing says, matrix products among it, where it says so."""
    schedule_check.compare(program.operations, code)
    made = schedule_check.written(code)
    same = len(made) == len(program.operations) and all(a.same(b) for a, b in zip(program.operations, made))
    return same and of_listing(program.listing) == of_code(uncommented(code))


@models
@phases
def test_code_is_in_the_listings_order(name, phase):
    program = programs(name)[phase]
    assert in_order(program, program.code)
    done = {o.verb for o in program.operations}
    assert done >= (
        {"all_gather", "wait"} if phase == "forward" else {"bucket", "pack", "reduce_scatter", "accumulate"}
    )


@models
@phases
def test_parameters_are_read_where_they_lie(name, phase):
    program = programs(name)[phase]
    assert sorted(reads(program.code)) == sorted(program.reads)
    assert bool(program.reads) == (name != MLP_), "a cast lies between"
    assert any(gathered(program.code))
    assert not copies(program.code)


@models
@phases
def test_pointers_are_aligned(name, phase):
    code = programs(name)[phase].code
    assert kernels(code)
    assert not unaligned(code)


def test_backward_compiles_where_strides_are_padded():
    program = programs(MLP_)["backward"]
    assert program.padded and "(32, 1031), (1088, 1)" in program.code, "rows of 1,031 take 1,088"
    (product,) = [args for name, args in calls(program.code) if name == "torch.ops.mfsdp.mm.default"]
    assert product[2:4] == ["[1031, 23]", "[23, 1]"] and "(1, 1088)" in product[4], "written dense, read padded"


def swapped(code: str, verb: str) -> str:
    """The first two calls of an operation, each in the other's place."""
    a, b = [m[1] for m in re.finditer(rf"torch\.ops\.mfsdp\.{verb}\.default\((.*)\)\n", code)][:2]
    return code.replace(a, "@").replace(b, a).replace("@", b)


def moved(code: str) -> str:
    """The last wait of all, at the very end."""
    *_, wait = re.finditer(r"\n *torch\.ops\.mfsdp\.wait\.default\(.*\)(?=\n)", code)
    end = code.index("\n        return (", wait.end())
    return code[: wait.start()] + code[wait.end() : end] + wait[0] + code[end:]


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
def test_collectives_that_change_places_are_found(verb):
    program = programs(MLP_)["backward"]
    with pytest.raises(InvariantError, match=f"`{verb} .* in the listing"):
        in_order(program, swapped(program.code, verb))


def test_an_operation_that_moves_is_found():
    program = programs(MLP_)["backward"]
    assert not in_order(program, moved(program.code))


SPOILT = {
    "pointer": (r"(divisible_by_16=\(|'configs': \[\{)(0, |\(0,\): .*?\]\], )", r"\1"),
    "offset in a kernel": (r"(tl\.load\(in_ptr\d \+ \(\d+)( \+)", r"\g<1>1\2"),
    "offset in a product": (r"(extern_kernels\.mm\(.*, )\d+(\), out)", r"\g<1>1\2"),
    "offset of a gradient": (r"(mfsdp\.mm\.default\(\w+, )\d+", r"\g<1>1"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_not_aligned_is_found(what):
    code = programs(LLAMA)["backward"].code
    spoilt = re.sub(*SPOILT[what], code)
    assert spoilt != code and unaligned(spoilt)


def test_copies_are_found():
    program = programs(LLAMA)["backward"]
    full = launches(program.code)[0]
    elsewhere = program.code.replace(f"reinterpret_tensor({full}, ", "reinterpret_tensor(copied, ")
    assert sorted(reads(elsewhere)) != sorted(program.reads)
    assert copies(program.code.replace(f"wait.default({full}, ", f"wait.default(aten.clone({full}), "))
    assert copies(re.sub(r"(tl\.store\(.*?\), )tmp\d+,", r"\1tmp1,", program.code)), "stored as it was loaded"
