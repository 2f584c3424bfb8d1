"""The pipeline: the table of passes, checked reasons for their order, and the runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from . import passes
from .config.best_effort import only_tells
from .config.options import Options
from .ir import byte_costs, printer
from .ir.program import Program, equal
from .ir.verifier import InvariantError, check
from .passes.schedule_offload import Pace

Pass = Callable[[Program], None]

Table = tuple[tuple[str, Pass], ...]

Decide = Callable[[Program], tuple[int, str]]
"""Returns how far ahead to launch a program's gathers, and why (`mfsdp.cost_model.auto_prefetch.AutoPrefetch`)."""


def table(
    prefetch: int | Decide = 1,
    reduce_lag: int = 1,
    *,
    wide: bool | None = None,
    pace: Pace | None = None,
    **options: Any,
) -> Table:
    """Returns the pipeline for options of the backend.

    Args:
        prefetch: a depth, or a function that decides it for each program.
        reduce_lag, options: as in `Options`.
        wide: whether the device that runs the programs can write 16-bit products into float32
            (`passes.inplace_wgrad`); ``None``: what the device of the trace can.
        pace: times of compute and host copies (`passes.schedule_offload`).
    """
    return _table(Options(reduce_lag=reduce_lag, **options), prefetch, wide, pace)


def _table(o: Options, prefetch: int | Decide, wide: bool | None, pace: Pace | None) -> Table:
    return (
        *((("interleave", passes.interleave),) if o.interleave else ()),
        ("collective", passes.collective),
        ("hide_collectives", partial(passes.hide_collectives, most=o.max_activations)),
        ("quantize", partial(passes.quantize, on=o.quantize)),
        ("gather", partial(passes.gather, keep_cast=o.keep_cast)),
        ("reshard", passes.reshard),
        ("reduce", passes.reduce),
        ("prefetch", partial(passes.prefetch, depth=prefetch, limit=o.max_unsharded)),
        ("defer", partial(passes.defer, lag=o.reduce_lag)),
        ("inplace_wgrad", passes.inplace_wgrad if wide is None else partial(passes.inplace_wgrad, wide=wide)),
        ("insert_checks", partial(passes.insert_checks, finite=o.check_finite > 0, replicas=o.check_replicas > 0)),
        ("schedule_offload", partial(passes.schedule_offload, pace=pace)),
        ("plan_memory", partial(passes.plan_memory, on=o.pool)),
        ("assign_groups", passes.assign_groups),
    )


PIPELINE = table()
"""The pipeline for the default options."""


def chosen(options: Options, wide: bool | None = None, decide: Decide | None = None, pace: Pace | None = None) -> Table:
    """Returns the passes for the backend's options.

    Args:
        options: the backend's options.
        wide, pace: as in `table`.
        decide: decides the depth under ``prefetch="auto"``; ``None``: the default depth.

    Raises:
        ValueError: ``passes`` is no table, has a name twice, contradicts `ORDER`, or lacks the pass that obeys another
            option that was given.
    """
    depth: Any = options.prefetch if options.prefetch != "auto" else decide or Options.prefetch
    ours = _table(options, depth, wide, pace)
    if options.passes is None:
        return ours
    rows = _rows(options.passes)
    if options.interleave and "interleave" not in dict(rows):
        rows = (*ours[:1], *rows)
    for option, name in _KNOBS.items():
        value = getattr(options, option)
        if value != getattr(Options, option) and option not in obeyed(options):
            raise ValueError(
                f"option {option}={value!r} is for the pass {name!r}, which is not in passes= as it is in PIPELINE: "
                f"put it there, or leave out {option}"
            )
    return tuple((name, dict(ours)[name] if (name, function) in PIPELINE else function) for name, function in rows)


def obeyed(options: Options) -> set[str]:
    """Returns the options whose passes are in the table unchanged."""
    rows = PIPELINE if options.passes is None else options.passes
    own = {name for name, function in rows if (name, function) in PIPELINE}
    return {option for option, name in _KNOBS.items() if name in own}


_KNOBS = {
    "prefetch": "prefetch",
    "max_unsharded": "prefetch",
    "reduce_lag": "defer",
    "pool": "plan_memory",
    "keep_cast": "gather",
    "max_activations": "hide_collectives",
    "quantize": "quantize",
    "check_finite": "insert_checks",
    "check_replicas": "insert_checks",
}
"""Options, and the pass that obeys each."""


def _rows(given: object) -> Table:
    """Returns the checked rows of a user's table."""
    rows = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not rows or not all(
        isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) and callable(row[1]) for row in rows
    ):
        raise ValueError(
            f"option passes={given!r}: give a table of passes, (*mfsdp.pipeline.PIPELINE, ('mine', my_pass))"
        )
    names = [name for name, _ in rows]
    twice = next((n for n in ["capture", *names] if [*names, "capture"].count(n) > 1), None)
    if twice is not None:
        raise ValueError(f"option passes: {twice!r} is there twice; give each pass a name of its own")
    for early, late, why in ORDER:
        if early in names and late in names and names.index(early) > names.index(late):
            raise ValueError(f"option passes: {early!r} has to come before {late!r}: {why}")
    return rows


OWN = {name for name, _ in PIPELINE}
"""Names of mfsdp's own passes."""

ORDER: tuple[tuple[str, str, str], ...] = (
    (
        "interleave",
        "collective",
        "collective puts a wait before its first reader; other microbatches' compute must be between them by then",
    ),
    (
        "interleave",
        "gather",
        "it orders microbatches by their markers, which gather replaces; one gather then serves all microbatches",
    ),
    ("interleave", "reduce", "a unit is reduced behind its last gradient, of whichever microbatch"),
    ("collective", "hide_collectives", "it moves the launches and waits that collective creates"),
    ("hide_collectives", "gather", "a unit is gathered where it is read first, wherever that moves"),
    ("hide_collectives", "reduce", "a unit is reduced behind its last gradient, wherever that moves"),
    ("hide_collectives", "quantize", "a unit is gathered where it is read first, wherever that moves"),
    ("interleave", "quantize", "microbatches read the same codes, which are gathered once for all of them"),
    ("quantize", "gather", "weights that quantize casts to FP8 must not be gathered in the policy's dtype too"),
    ("collective", "reshard", "what another parallelism's collective reads lives until the wait"),
    ("gather", "reshard", "there is nothing to free before something is gathered"),
    ("gather", "reduce", "a listing shows parameters before their gradients; values do not depend on it"),
    ("reshard", "prefetch", "the limit max_unsharded depends on where buffers are freed"),
    ("reduce", "defer", "it moves the waits that reduce inserts"),
    (
        "defer",
        "inplace_wgrad",
        "defer puts a wait before the gradient buffer that needs its memory; inplace_wgrad then moves that buffer up",
    ),
    ("prefetch", "plan_memory", "static buffers are assigned over the final order of launches and frees"),
    ("inplace_wgrad", "insert_checks", "a gradient buffer is looked at when the last product has been written to it"),
    ("defer", "insert_checks", "a reduced gradient is checked after its wait, which defer moves"),
    ("collective", "schedule_offload", "a value of another parallelism's collective is complete behind its wait"),
    ("prefetch", "schedule_offload", "the simulated time of a copy depends on where gathers are launched"),
    ("defer", "schedule_offload", "the simulated time of a copy depends on where compute waits for reductions"),
    (
        "inplace_wgrad",
        "schedule_offload",
        "a copy is launched behind pointwise compute, and products may have become writes",
    ),
    ("schedule_offload", "plan_memory", "a listing shows copies before slots; programs do not depend on it"),
    ("insert_checks", "plan_memory", "a checked value stays alive until its check"),
    ("inplace_wgrad", "plan_memory", "slots are coloured over the final lives of gradient buffers"),
    ("plan_memory", "assign_groups", "a listing shows slots before groups; programs do not depend on it"),
)
"""Earlier pass, later pass, reason."""


def common(rows: Table) -> tuple[Table, Table]:
    """Splits a table of passes before the first one that obeys an option that `mfsdp.explain` tries (`Phases` changes
    the order of passes, and so might change what a suggestion says in the last digit).
    """
    tried = {_KNOBS[option] for option in ("prefetch", "max_unsharded", "reduce_lag", "pool")}
    cut = next((i for i, (name, _) in enumerate(rows) if name in tried), len(rows))
    return rows[:cut], rows[cut:]


class Phases(NamedTuple):
    """A table of passes in three parts, for callers that try options."""

    first: Table
    """Passes before `defer`, which obey none of the tried options."""
    deferred: Table
    """`defer` and the passes after it, without ``again``."""
    again: Table
    """Passes that place launches and buffers; they can run on one program repeatedly."""


def phases(rows: Table) -> Phases:
    """Splits a table of passes. ``again`` may run last, as launches of gathers move past the results of
    ``deferred``.
    """
    names = ("prefetch", "schedule_offload", "plan_memory")
    rest = [row for row in rows if row[0] not in names]
    cut = next((i for i, (name, _) in enumerate(rest) if name == "defer"), len(rest))
    return Phases(tuple(rest[:cut]), tuple(rest[cut:]), tuple(row for row in rows if row[0] in names))


_names = [name for name, _ in table(interleave=True)]
for _early, _late, _why in ORDER:
    assert _names.index(_early) < _names.index(_late), f"{_early} before {_late}: {_why}"


@dataclass(frozen=True)
class Stage:
    """The result of one pass."""

    name: str
    listing: str
    seconds: float


class Stages(list[Stage]):
    """The results of the passes, in order; ``stages["inplace_wgrad"]`` is one by name."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = next((stage for stage in self if stage.name == key), None)
        if found is None:
            raise KeyError(f"no pass {key!r} has run; there are {', '.join(stage.name for stage in self)}")
        return found


class PassError(RuntimeError):
    """A pass raised (the cause is its exception), or left a node before its input."""


def run(
    program: Program,
    *,
    upto: str | None = None,
    passes: Table = PIPELINE,
    checked: bool = True,
    listings: bool = True,
) -> Stages:
    """Runs the passes in order, verifies the invariants after each, and returns the listing after each.

    Args:
        program: rewritten in place.
        upto: name of the last pass to run, ``"capture"`` for none.
        passes: the table; put your own ``(name, pass)`` into a copy of `PIPELINE` or of what `table` returns.
        checked: whether to verify the invariants.
        listings: whether to render listings (takes time on large graphs).

    Raises:
        ValueError: ``upto`` is not a pass.
        InvariantError: a pass broke an invariant; the message names it and shows the listing around the fault.
        PassError: a pass raised, or left a node before its input; the message names the pass.
    """
    names = ["capture", *(name for name, _ in passes)]
    if upto is not None and upto not in names:
        raise ValueError(f"upto={upto!r} is no pass; the passes are {', '.join(names)}")
    program.told = listings
    listed = _Listed() if listings else None
    stages = Stages([Stage("capture", listed.after("capture", program) if listed else "", 0.0)])
    if checked:
        _check(program, "capture")
    state = program.state() if checked or listings else []
    for name, function in passes[: names.index(upto) if upto else len(passes)]:
        start = time.perf_counter()
        _run(program, name, function)
        before, state = state, program.state() if checked or listings else []
        changed = name not in OWN or not equal(before, state)  # others may write to what nodes share
        if checked and changed:
            _check(program, name)
        seconds = time.perf_counter() - start
        stages.append(Stage(name, listed.after(name, program, changed) if listed else "", seconds))
    program.gm.recompile()
    return stages


class _Listed:
    """Renders the listings of one program, after one pass after the other."""

    def __init__(self) -> None:
        self._before: printer.Summary | None = None
        self._known: tuple[list[byte_costs.Line], str] | None = None
        """Lines of the program, and the listing's text of them."""

    def after(self, name: str, program: Program, changed: bool = True) -> str:
        def rendered() -> str:
            known, before = None if changed else self._known, self._before
            self._known = self._before = None
            if known is None:
                rows = byte_costs.lines(program)
                known = rows, printer.tail(program, rows)
            rows, below = known
            text = printer.render(program, name, before, rows=rows, below=below)
            self._known, self._before = known, printer.summary(rows)
            return text

        return only_tells(f"the listing after {name}", "", rendered)


def rewrite(program: Program, passes: Table) -> None:
    """Runs passes on a program for inspection: without verification, listings or generated code.

    Raises:
        PassError: a pass raised; the message names the pass.
    """
    program.told = False
    for name, function in passes:
        _run(program, name, function)


def _run(program: Program, name: str, function: Pass) -> None:
    program.notes.clear()
    program.changes.clear()
    try:
        function(program)
    except Exception as error:
        text = f"mfsdp: the pass {name!r} raised on {program.name} {program.phase}: {type(error).__name__}: {error}"
        raise PassError(text) from error


def _check(program: Program, stage: str) -> None:
    try:
        check(program)
    except InvariantError as broken:
        around = only_tells("the listing around the fault", "", printer.around, program, broken.node)
        broken.args = (f"mfsdp: after {stage}: {broken.args[0]}\n{around}",)
        raise
    except RuntimeError as error:  # torch's own check of the graph
        late = next(((n, i) for n in program.nodes for i in n.all_input_nodes if not i < n), None)
        if late is None:
            raise
        around = only_tells("the listing around the fault", "", printer.around, program, late[0])
        text = f"mfsdp: after {stage}: {late[0].name} runs before its input {late[1].name}: move both\n{around}"
        raise PassError(text) from error
