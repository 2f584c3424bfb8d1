"""What a user may choose: precision per role, and the options of the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any

import torch

from .comm_formats import INT8, refusal
from .plans import nbytes_of


@dataclass(frozen=True)
class Precision:
    """The dtypes of one flat buffer, one per role, all resolved (no ``None`` left), and the formats that travel."""

    main: torch.dtype
    """Main weights, what the optimizer sees."""
    comm: torch.dtype
    """What an all-gather brings; what it carries too, unless ``wire`` says otherwise."""
    compute: torch.dtype
    """What the model's own code sees."""
    grad_comm: torch.dtype
    """What gradients are packed in; what a reduce-scatter carries too, unless ``grad_wire`` says otherwise."""
    grad: torch.dtype
    """What gradients are accumulated in."""
    grad_sum: str | None = field(default=None, kw_only=True)
    """How sums over ranks are taken: ``"wide"``, ``"native"``, or, if ``None``, by their number."""
    wire: str | None = field(default=None, kw_only=True)
    """The format that an all-gather carries main weights in: ``"int8"``, or ``None`` for ``comm`` as it is."""
    grad_wire: str | None = field(default=None, kw_only=True)
    """The same of gradients, which are added up in float32 at least."""

    def sum(self, ranks: int) -> torch.dtype:
        """What a sum over so many ranks is taken in: what travels, or the accumulator's dtype, if that is wider."""
        if self.grad_wire is not None:
            return torch.promote_types(self.grad, torch.float32)
        wide = ranks <= WIDE_RANKS if self.grad_sum is None else self.grad_sum == "wide"
        return self.grad if wide and self.grad.itemsize > self.grad_comm.itemsize else self.grad_comm


WIDE_RANKS = 64
"""Up to so many ranks sums are taken wide by default: the messages of an all-to-all, and with them its latency and the
room that NCCL keeps for each peer, grow with the number of ranks. Not measured."""

GRAD_SUMS = ("wide", "native")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each role of a parameter has. ``None`` means: derived, as said below.

    Args:
        main_params_dtype: main weights and the optimizer. ``None``: the model's own dtype. A model wider than
            this (float64) keeps its own, so that nothing is lost by wrapping. Frozen parameters keep theirs until one
            of their unit is to train (``requires_grad_()``).
        main_grads_dtype: accumulated gradients. ``None``: float32 when compute is 16 bit or lower, else the
            compute dtype.
        grad_comm_dtype: gradients on the wire. ``None``: ``main_grads_dtype``. What an all-reduce (``no_shard``, HSDP's
            outer axis) brings back is rounded to it. ``"int8"``: see below.
        param_comm_dtype: parameters on the wire. ``None``: ``compute_dtype``. ``"int8"``: see below.
        compute_dtype: what ``forward`` sees. ``None``: the model's own dtype at wrap time.
        output_dtype: what floating-point results of the forward are cast to, of the module that `fully_shard` is called
            on, not of those in ``units``. ``None``: they are left alone.
        cast_forward_inputs: whether floating-point arguments of a unit's forward are cast to ``compute_dtype``, if that
            is given.
        grad_sum: how gradients that travel narrower than ``main_grads_dtype`` are added up over ranks. ``"wide"``: in
            ``main_grads_dtype``, which takes room for what all ranks send; ``"native"``: in ``grad_comm_dtype``, by the
            communication library where there is one (in the order of ranks over gloo), rounded in every addition.
            ``None``: wide over at most 64 ranks of an axis, native over more.
        param_dtype, reduce_dtype: FSDP2's names of ``compute_dtype`` and ``grad_comm_dtype``.

    The string ``"int8"`` is no dtype but a format, lossy, and never a default: blocks of 128 elements, each a byte,
    ``round(x / scale)``, with a scale in float32, the largest magnitude of the block over 127. Nothing else changes:
    main weights, sums over ranks and accumulators are as wide as without it, and checkpoints have main weights as they
    are. Parameters arrive, and gradients are packed, in ``compute_dtype``. Errors: docs/guides/precision.md.

    Raises:
        ValueError: a dtype is neither a floating-point ``torch.dtype`` nor, of what travels, ``"int8"``; one role has
            two of them; ``grad_sum`` is something else, or ``"native"`` where gradients travel in int8.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | str | None = None
    param_comm_dtype: torch.dtype | str | None = None
    compute_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    grad_sum: str | None = None
    param_dtype: InitVar[torch.dtype | None] = None
    reduce_dtype: InitVar[torch.dtype | str | None] = None

    def __post_init__(self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | str | None) -> None:
        self._also("compute_dtype", "param_dtype", param_dtype)
        self._also("grad_comm_dtype", "reduce_dtype", reduce_dtype)
        if self.grad_sum not in (None, *GRAD_SUMS):
            raise ValueError(
                f"MixedPrecisionPolicy: grad_sum={self.grad_sum!r}: choose 'wide' (gradients are added up in "
                "main_grads_dtype), 'native' (in grad_comm_dtype) or None (by the number of ranks)"
            )
        for name in (f.name for f in fields(self)):
            dtype = getattr(self, name)
            if dtype is None or name in ("cast_forward_inputs", "grad_sum"):
                continue
            travels = name in ("grad_comm_dtype", "param_comm_dtype")
            if travels and isinstance(dtype, str) and dtype == INT8:
                continue
            if not isinstance(dtype, torch.dtype) or dtype not in SHORT:
                why = refusal(dtype) if travels else ""
                formats = f", or {INT8!r}" if travels else ""
                raise ValueError(
                    f"MixedPrecisionPolicy: {name}={dtype!r} is not supported{f': {why}' if why else ''}; "
                    f"choose None or one of {', '.join(str(d) for d in SHORT)}{formats}"
                )
        if self.grad_comm_dtype == INT8 and self.grad_sum == "native":
            raise ValueError(
                "MixedPrecisionPolicy: grad_sum='native' with grad_comm_dtype='int8': no library adds up bytes that "
                "have scales. Leave grad_sum out: they are added up in float32, over any number of ranks"
            )

    def _also(self, name: str, alias: str, value: torch.dtype | str | None) -> None:
        if value is None:
            return
        if getattr(self, name) not in (None, value):
            raise ValueError(
                f"MixedPrecisionPolicy: {alias}={value!r} is FSDP2's name of {name}={getattr(self, name)!r}: give one"
            )
        object.__setattr__(self, name, value)

    def resolve(self, dtype: torch.dtype, trains: bool = True) -> Precision:
        """Dtypes and formats for a parameter whose own dtype is ``dtype``, that trains or is frozen."""
        main = (self.main_params_dtype if trains else None) or dtype
        if dtype.itemsize > main.itemsize:
            main = dtype
        compute = self.compute_dtype or dtype
        grad = self.main_grads_dtype or (torch.float32 if compute.itemsize <= 2 else compute)
        comm, grad_comm = self.param_comm_dtype or compute, self.grad_comm_dtype or grad
        return Precision(
            main=main,
            comm=compute if isinstance(comm, str) else comm,
            compute=compute,
            grad_comm=compute if isinstance(grad_comm, str) else grad_comm,
            grad=grad,
            grad_sum=self.grad_sum,
            wire=comm if isinstance(comm, str) else None,
            grad_wire=grad_comm if isinstance(grad_comm, str) else None,
        )


SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}
"""Floating dtypes a parameter may have, and how specs and listings abbreviate them."""

PLANNED = ("prefetch", "reduce_lag", "max_unsharded", "max_activations")
"""Options that a plan chooses, or has no use for."""

LOWERINGS = ("inductor", "stitched", "whole", "eager")


@dataclass(frozen=True)
class Options:
    """The backend's options, checked. See ``torch.compile(model, backend="mfsdp", options={...})``.

    Raises:
        ValueError: an unknown option, or a value out of range; the message lists what is valid.
        NotImplementedError: ``nccl_ub``.
    """

    prefetch: int | str = 1
    """How many units ahead a gather is launched; 0 turns it off. ``"auto"``: as many, of 0 to 4, as the clock finds
    worth it, program by program (`mfsdp.cost_model.auto_prefetch`); 1 where nothing is known of the hardware."""
    reduce_lag: int = 1
    """How many reductions may be in flight behind compute; 0 waits at once."""
    max_unsharded: int | None = None
    """Bytes of gathered parameters that may be live at once; prefetching yields to it."""
    memory: int | str | None = None
    """Bytes of the device that a rank may take, or a text, ``"70GB"``: which layers are computed again, stay gathered,
    or go to the host, how far ahead to gather and how long reductions may lag is then chosen for the fastest step that
    fits, while the model is compiled, the same on all ranks (`mfsdp.plan`); AdamW is assumed."""
    max_activations: int | None = None
    """Bytes of activations that may live longer at each launch of another parallelism's collective, for what is
    computed behind it instead of in front (`passes.hide_collectives`); ``None``: no limit."""
    pool: bool = True
    """Whether gathered buffers and gradient buffers get static slots."""
    keep_cast: bool = True
    """Whether a shard in the dtype that travels is kept from one optimizer step to the next. Of no effect where that is
    int8, which is written anew for every gather.
    """
    quantize: bool = True
    """Whether weights that the model casts to one byte per element (FP8) are cast before they travel."""
    interleave: bool = False
    """Whether microbatches that are in one program take turns at its units (`mfsdp.together` asks for it)."""
    nccl_ub: bool = False
    """Megatron-FSDP's: whether NCCL registers static buffers as user buffers. ``True`` is refused: not built yet."""
    disable_symmetric_registration: bool = False
    """Megatron-FSDP's: registers them without symmetric windows. Means nothing without ``nccl_ub``, as there."""
    lowering: str = "inductor"
    """``"inductor"``: ``"stitched"``, each kind of stretch of compute compiled once, the schedule run by a driver of
    ours. ``"whole"``: one Inductor graph per program. ``"eager"``: ATen kernels one by one, the oracle.
    """
    check: bool = True
    """Run the law checker after every pass, and compare Inductor's code with the listing."""
    patience: float | None = 120.0
    """Seconds after which a collective that is not complete is reported on every rank: which, and who has not come;
    ``None``: never. One watch looks after a process: what the model that was compiled last asks for holds."""
    on_stall: str = "report"
    """``"report"``, or ``"raise"``: a collective that is not complete in time ends the run, on every rank, with that
    report."""
    check_finite: int = 0
    """Every how many steps programs look for Inf and NaN in weights, in what units compute, and in gradients, and say
    on every rank where the first is; 0: never (`mfsdp.runtime.runtime_checks`)."""
    check_replicas: int = 0
    """Every how many steps they compare weights that several ranks should hold alike; 0: never."""
    frames: bool = False
    """Whether operations run in Python frames called after them and their units (``all_gather layers.3``) also while
    nobody is known to look: for py-spy and debuggers. Costs host time.
    """
    dump: str | None = None
    """Folder for the listings; ``MFSDP_DUMP`` when not given."""
    upto: str | None = None
    """Stop the pipeline after this pass (for tests and bisecting)."""
    passes: Sequence[tuple[str, Callable[..., None]]] | None = None
    """A table of passes instead of the pipeline, ``(*mfsdp.pipeline.PIPELINE, ("mine", my_pass))``; rows that are the
    pipeline's own obey the options above."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from the mapping that ``torch.compile`` hands on."""
        given = dict(options or {})
        valid = {f.name: f.default for f in fields(cls)}
        unknown = sorted(set(given) - set(valid))
        if unknown:
            raise ValueError(
                f"backend 'mfsdp' does not know the option {', '.join(map(repr, unknown))}; valid options are "
                + ", ".join(f"{k} (default {v!r})" for k, v in valid.items())
            )
        out = cls(**given)
        if out.memory is not None:
            out = replace(out, memory=nbytes_of(out.memory, "option memory"))
            both = next((name for name in PLANNED if name in given), None)
            if both is not None:
                raise ValueError(f"options memory= and {both}= were both given: the plan chooses {both}; leave one out")
        for name, low in (
            ("prefetch", 0), ("reduce_lag", 0), ("max_unsharded", 1), ("max_activations", 0), ("check_finite", 0),
            ("check_replicas", 0),
        ):  # fmt: skip
            value = given.get(name, low)
            if (value is None and valid[name] is None) or (name == "prefetch" and value == "auto"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                other = ", or 'auto'" if name == "prefetch" else ""
                raise ValueError(f"option {name}={value!r}: give an integer of at least {low}{other}")
        for name in (
            "pool", "keep_cast", "quantize", "interleave", "nccl_ub", "disable_symmetric_registration", "check",
            "frames",
        ):  # fmt: skip
            value = getattr(out, name)
            if not isinstance(value, bool):
                raise ValueError(f"option {name}={value!r}: choose True or False")
        if out.nccl_ub:
            raise NotImplementedError(
                "option nccl_ub=True: registering static buffers with NCCL has not run on a GPU yet, and is not built. "
                "What there is: each static buffer has a memory pool of its own (option pool), which NCCL could "
                "register. Leave nccl_ub out: collectives run over the same buffers, unregistered; narrow gradients "
                "(grad_comm_dtype) are added up in main_grads_dtype all the same"
            )
        if out.patience is not None and (
            isinstance(out.patience, bool) or not isinstance(out.patience, (int, float)) or not 0 < out.patience < 1e9
        ):
            raise ValueError(f"option patience={out.patience!r}: give seconds, more than 0, or None")
        if out.on_stall not in ("report", "raise"):
            raise ValueError(f"option on_stall={out.on_stall!r}: choose 'report' or 'raise'")
        if out.lowering not in LOWERINGS:
            raise ValueError(f"option lowering={out.lowering!r}: choose one of {LOWERINGS}")
        if out.dump is not None and not isinstance(out.dump, (str, os.PathLike)):
            raise ValueError(f"option dump={out.dump!r}: give the path of a folder, or None")
        return out

    def following(self, chosen: Mapping[str, int]) -> Options:
        """With what a plan has chosen."""
        return replace(self, **chosen)  # type: ignore[arg-type]

    @property
    def folder(self) -> str | None:
        """Where listings go, or ``None``."""
        return os.fspath(self.dump) if self.dump else os.environ.get("MFSDP_DUMP") or None
