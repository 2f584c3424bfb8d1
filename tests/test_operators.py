"""Every operator of torch's own database on sharded tensors: right, or refused on all ranks alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import mfsdp
from mfsdp.dtensor.shard_spec import ShardSpec
from mfsdp.dtensor.sharded_dtensor import ShardedDTensor
from tests.helpers.parity import whole

pytestmark = pytest.mark.dist


@cache
def cut_as(shape: tuple[int, ...]) -> ShardSpec:
    """How a parameter of a shape is cut."""
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(shape))
    return mfsdp.fully_shard(module).w.sharding


def sharded(t: torch.Tensor) -> torch.Tensor:
    """A tensor, cut as a parameter of its shape is."""
    sharding = cut_as(tuple(t.shape))
    return ShardedDTensor(sharding.part(t.detach()).clone(), sharding)


def outcome(call: Any) -> Any:
    torch.default_generator.manual_seed(5)  # torch.manual_seed takes its time for devices that are not there
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def alike(mine: Any, want: Any) -> bool:
    flat, expected = (tree_flatten(x)[0] for x in (mine, want))
    for a, b in zip(flat, expected, strict=True):
        if isinstance(b, torch.Tensor):
            a = whole(a) if isinstance(a, ShardedDTensor) else a
            if a.shape != b.shape or a.dtype != b.dtype:
                return False
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
                return False
        elif a != b and not (a != a and b != b):
            return False
    return True


def cut_some(tree: Any, shape: torch.Size) -> Any:
    """Tensors of a shape are sharded, others stay as they are."""
    fits = lambda t: isinstance(t, torch.Tensor) and t.layout is torch.strided and t.shape == shape  # noqa: E731
    return tree_map(lambda t: sharded(t) if fits(t) else t, tree)


def samples_of(info: Any, most: int) -> Iterator[tuple[torch.Tensor, Any]]:
    """The first tensor of each sample that can be cut, and (input, args, kwargs)."""
    torch.manual_seed(0)
    for _, s in zip(range(2 * most), info.sample_inputs("cpu", torch.float32, requires_grad=False)):
        first = s.input[0] if isinstance(s.input, (list, tuple)) and s.input else s.input
        if isinstance(first, torch.Tensor) and first.layout is torch.strided and first.dim() and first.numel():
            yield first, (s.input, s.args, s.kwargs)


RIGHT = {"add", "bernoulli", "any", "max.reduction_no_dim", "sum"}
REFUSED = {"sort", "cumsum", "max.reduction_with_dim", "nn.functional.linear"}


def database(samples: int, every: int) -> dict[str, Any]:
    """What is wrong, for those named above and one in ``every`` of all, and which were right and refused."""
    from torch.testing._internal.common_methods_invocations import op_db

    wrong: dict[str, str] = {}
    right, refused = set(), set()
    for i, info in enumerate(op_db):
        if i % every and info.full_name not in RIGHT | REFUSED:
            continue
        if "empty" in info.name or torch.float32 not in info.dtypes:  # nobody knows what is in empty ones
            continue
        for first, (value, args, kwargs) in islice(samples_of(info, samples), samples):
            try:
                want = outcome(partial(info.op, value, *args, **kwargs))
            except Exception:
                continue
            cut, more = cut_some(value, first.shape), cut_some((args, kwargs), first.shape)
            same = all(a is b for a, b in zip(tree_flatten(more)[0], tree_flatten((args, kwargs))[0], strict=True))
            for others in ((args, kwargs),) if same else ((args, kwargs), more):
                try:
                    mine = outcome(partial(info.op, cut, *others[0], **others[1]))
                except Exception:
                    refused.add(info.full_name)
                    continue
                if alike(mine, want):
                    right.add(info.full_name)
                else:
                    wrong[info.full_name] = f"{first.dtype} {tuple(first.shape)} {args} {kwargs}"[:200]
    return {"wrong": wrong, "right": sorted(right), "refused": sorted(refused)}


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "every"), [(3, 3), pytest.param(6, 1, marks=pytest.mark.exhaustive)])
def test_operators_are_right_or_refused_on_all_ranks(two_ranks, samples, every):
    """An operator that ranks do not refuse alike would end as an error of ranks that have gone apart."""
    for told in two_ranks.run(database, samples, every, timeout=600):
        assert not told["wrong"] and len(told["right"]) + len(told["refused"]) > 500 / every
        assert set(told["right"]) >= RIGHT and set(told["refused"]) >= REFUSED


def rows_and_bits() -> list[str]:
    """What one would do to gradients and bits, and what is wrong with it."""
    torch.manual_seed(0)
    wrong, t = [], torch.randn(5, 7)
    x = sharded(t)
    refused: dict[str, Callable[[torch.Tensor], Any]] = {
        "any(dim)": lambda x: (x != 0).any(dim=1),
        "all(dim)": lambda x: (x != 0).all(dim=0),
        "max(dim)": lambda x: x.max(dim=1),
        "foreach max": lambda x: torch._foreach_max([x])[0],
        "bits of another width": lambda x: x.view(torch.int16),
        "places": lambda x: torch.inference_mode()(torch.where)(x > 0),
    }
    for name, call in refused.items():
        try:
            call(x)
            wrong.append(f"{name} is not refused")
        except NotImplementedError as error:
            if "full_tensor()" not in str(error):
                wrong.append(f"{name}: {error}")
    nan = t.clone()
    nan[-1, -1] = torch.nan  # on the last rank alone
    right: dict[str, Callable[[torch.Tensor], Any]] = {
        "bits": lambda x: x.view(torch.int32),
        "max": lambda x: x.max(),
        "any of all": lambda x: (x > 0).any(dim=(0, 1)),
        "kept": lambda x: x.sum((0, 1), keepdim=True),
        "norm": lambda x: torch.linalg.vector_norm(x, dim=(0, 1), keepdim=True),
        "by one": lambda x: x / x.sum((0, 1), keepdim=True),
        "out": lambda x: torch.add(x, x, out=torch.zeros_like(x)),
        "integers": lambda x: (x.nan_to_num() * 9).long().amin(),
        "drawn": lambda x: torch.bernoulli(x.nan_to_num().sigmoid()),
        "drawn in place": lambda x: torch.zeros_like(x).bernoulli_(x.nan_to_num().sigmoid()),
        "parts": lambda x: x.nan_to_num().frexp()[1],
    }
    for name, call in right.items():
        for what in (t, nan):
            if not alike(outcome(partial(call, sharded(what))), outcome(partial(call, what))):
                wrong.append(name)
    return wrong


def test_rows_bits_and_numbers_that_are_none(two_ranks):
    assert two_ranks.run(rows_and_bits) == [[], []]
