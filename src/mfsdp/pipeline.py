"""The pipeline: the passes as one table, their order as reasons that are checked, and the runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import listing
from .check import LawError, check
from .passes.bucket import bucket
from .passes.defer import defer
from .passes.gather import gather
from .passes.pool import pool
from .passes.prefetch import prefetch
from .passes.reduce import reduce
from .passes.reshard import reshard
from .passes.stream import stream
from .program import Program

Pass = Callable[[Program], None]

Table = tuple[tuple[str, Pass], ...]


def table(depth: int = 1, lag: int = 1, limit: int | None = None, slots: bool = True) -> Table:
    """The pipeline under the backend's options ``prefetch``, ``reduce_lag``, ``max_unsharded`` (bytes) and ``pool``."""
    return (
        ("gather", gather),
        ("reshard", reshard),
        ("reduce", reduce),
        ("prefetch", partial(prefetch, depth=depth, limit=limit)),
        ("defer", partial(defer, lag=lag)),
        ("bucket", bucket),
        ("pool", partial(pool, on=slots)),
        ("stream", stream),
    )


PIPELINE = table()
"""The defaults."""

ORDER: tuple[tuple[str, str, str], ...] = (
    ("gather", "reshard", "there is nothing to free before something is gathered"),
    ("gather", "reduce", "a listing shows parameters before their gradients; values do not depend on it"),
    ("reshard", "prefetch", "a limit on gathered bytes has to know when buffers go"),
    ("reduce", "defer", "there is no reduction to wait for before"),
    (
        "defer",
        "bucket",
        "a wait belongs in front of the pack it makes room for, before that buffer moves up",
    ),
    ("prefetch", "pool", "slots are coloured over the final order of launches and frees"),
    ("bucket", "pool", "slots are coloured over the final lives of gradient buffers"),
    ("pool", "stream", "a listing shows slots before groups; programs do not depend on it"),
)
"""Earlier, later, why."""

_names = [name for name, _ in PIPELINE]
for _early, _late, _why in ORDER:
    assert _names.index(_early) < _names.index(_late), f"{_early} before {_late}: {_why}"


@dataclass(frozen=True)
class Stage:
    """What one pass did."""

    name: str
    listing: str
    seconds: float


def run(
    program: Program,
    *,
    upto: str | None = None,
    passes: Table = PIPELINE,
    checked: bool = True,
    listings: bool = True,
) -> list[Stage]:
    """Runs the passes in order, checks every law after each, and returns the listing after each.

    Args:
        program: rewritten in place.
        upto: name of the last pass to run, ``"capture"`` for none.
        passes: the table; put your own ``(name, pass)`` into a copy of `PIPELINE` or of what `table` gives.
        checked: whether to check the laws.
        listings: whether to render (costs time on large graphs).

    Raises:
        ValueError: ``upto`` is no pass.
        LawError: a pass broke a law; the message names the law and shows the listing around the fault.
    """
    names = ["capture", *(name for name, _ in passes)]
    if upto is not None and upto not in names:
        raise ValueError(f"upto={upto!r} is no pass; the passes are {', '.join(names)}")
    stages = [Stage("capture", listing.render(program, "capture") if listings else "", 0.0)]
    if checked:
        _check(program, "capture")
    for name, function in passes[: names.index(upto) if upto else len(passes)]:
        before = listing.summary(program) if listings else None
        program.notes.clear()
        program.changes.clear()
        start = time.perf_counter()
        function(program)
        if checked:
            _check(program, name)
        seconds = time.perf_counter() - start
        stages.append(Stage(name, listing.render(program, name, before) if listings else "", seconds))
    program.gm.recompile()
    return stages


def _check(program: Program, stage: str) -> None:
    try:
        check(program)
    except LawError as broken:
        around = listing.around(program, broken.node)
        broken.args = (f"mfsdp: after {stage}: {broken.args[0]}\n{around}",)
        raise
