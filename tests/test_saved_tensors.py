"""What autograd saves of a gathered buffer comes back from another gather bit for bit, whatever view it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp.sharding.eager import _Saved

STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": torch.view_as_complex,
    "conjugate": torch.conj,
    "imaginary": lambda t: t.imag,
    "real": lambda t: t.real,
    "bytes": lambda t: t.view(torch.uint8),
    "integers": lambda t: t.view(torch.int32),
    "halves": lambda t: t.view(torch.bfloat16),
    "turned": lambda t: t.mT,
    "later": lambda t: t[1:],
    "every other": lambda t: t[..., ::2],
}


class Regathered:
    """A ticket that gathers into other memory."""

    def __init__(self, full: torch.Tensor):
        self.full = full

    def storage(self) -> torch.Tensor:
        return self.full.clone()


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=5))
def test_any_view_comes_back(names: list[str]):
    full = torch.randn(240, generator=torch.Generator().manual_seed(0))
    view: Any = full[16:].unflatten(0, (7, 16, 2))
    for name in names:
        try:
            view = STEPS[name](view)
        except (RuntimeError, TypeError):  # no view of that kind of this one
            return
    saved = _Saved(Regathered(full), view).tensor()
    for of in (torch.Tensor.dtype.__get__, torch.is_conj, torch.is_neg, torch.Tensor.stride, torch.Tensor.size):
        assert of(saved) == of(view)
    assert saved.storage_offset() == view.storage_offset() and saved.data_ptr() != view.data_ptr()
    mine, want = (t.resolve_conj().resolve_neg().contiguous() for t in (saved, view))
    assert mine.view(-1).view(torch.uint8).equal(want.view(-1).view(torch.uint8))
