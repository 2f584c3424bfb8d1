"""User options: precision per role, and the options of the backend."""

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
    """The resolved dtypes of one flat buffer, one per role, and its communication formats."""

    main: torch.dtype
    """Main weights, which the optimizer updates."""
    comm: torch.dtype
    """The result of an all-gather; also its communication dtype, unless ``wire`` is set."""
    compute: torch.dtype
    """The dtype that the model's code sees."""
    grad_comm: torch.dtype
    """Packed gradients; also the communication dtype of a reduce-scatter, unless ``grad_wire`` is set."""
    grad: torch.dtype
    """Accumulated gradients."""
    grad_sum: str | None = field(default=None, kw_only=True)
    """Sums over ranks: ``"wide"``, ``"native"``, or ``None``, which depends on the number of ranks."""
    wire: str | None = field(default=None, kw_only=True)
    """Format in which an all-gather communicates main weights: ``"int8"``, or ``None`` for ``comm``."""
    grad_wire: str | None = field(default=None, kw_only=True)
    """The same for gradients, which are summed in float32 at least."""

    def sum(self, ranks: int) -> torch.dtype:
        """Returns the dtype of a sum over ``ranks`` ranks: ``grad_comm``, or, for a wide sum, ``grad`` if it is
        wider.
        """
        if self.grad_wire is not None:
            return torch.promote_types(self.grad, torch.float32)
        wide = ranks <= WIDE_RANKS if self.grad_sum is None else self.grad_sum == "wide"
        return self.grad if wide and self.grad.itemsize > self.grad_comm.itemsize else self.grad_comm


WIDE_RANKS = 64
"""Sums over at most this many ranks are wide by default: the messages of an all-to-all, and with them its latency and
NCCL's buffer for each peer, grow with the number of ranks. Not measured."""

GRAD_SUMS = ("wide", "native")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtype of each role of a parameter; ``None`` derives it as described here.

    Args:
        main_params_dtype: main weights and the optimizer. ``None``: the model's dtype. Wider models (float64) keep
            theirs, so that wrapping loses nothing; so do frozen parameters, until one of their unit becomes trainable
            (``requires_grad_()``).
        main_grads_dtype: accumulated gradients. ``None``: float32 if compute has 16 bits or fewer, else the compute
            dtype.
        grad_comm_dtype: communicated gradients, or ``"int8"`` (below). ``None``: ``main_grads_dtype``. The result of an
            all-reduce (``no_shard``, HSDP's outer axis) is rounded to it.
        param_comm_dtype: communicated parameters, or ``"int8"`` (below). ``None``: ``compute_dtype``.
        compute_dtype: what ``forward`` sees. ``None``: the model's dtype at wrap time.
        output_dtype: floating-point results of the forward of the module that `fully_shard` is called on, not of
            ``units``. ``None``: not cast.
        cast_forward_inputs: whether floating-point arguments of a unit's forward are cast to a given ``compute_dtype``.
        grad_sum: sums over ranks of gradients narrower than ``main_grads_dtype``. ``"wide"``: in ``main_grads_dtype``,
            with a buffer for all ranks' gradients. ``"native"``: in ``grad_comm_dtype``, by the communication library
            if it can (over gloo in rank order), rounded at every addition. ``None``: wide over at most 64 ranks of an
            axis, native over more.
        param_dtype, reduce_dtype: FSDP2's names of ``compute_dtype`` and ``grad_comm_dtype``.

    The lossy format ``"int8"`` is never a default: blocks of 128 elements, each element a byte, ``round(x / scale)``,
    with a float32 scale, the block's largest magnitude divided by 127. Main weights, sums over ranks, accumulators and
    checkpoints stay as wide as without it. Gathered parameters and packed gradients are in ``compute_dtype``. Errors:
    docs/guides/precision.md.

    Raises:
        ValueError: a dtype is neither a floating-point ``torch.dtype`` nor, for communication, ``"int8"``; one role has
            two of them; ``grad_sum`` has another value, or is ``"native"`` with int8 gradients.
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
        """Returns the dtypes and formats of a parameter of dtype ``dtype``, trained or frozen. Bytes stay bytes."""
        if dtype is torch.uint8:
            return Precision(dtype, dtype, dtype, torch.float32, torch.float32)
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
"""Floating-point dtypes that a parameter may have, and their abbreviations in specs and listings."""

SHORT_ALL = {**SHORT, torch.uint8: "u8"}
"""The same with that of quantized weights (`mfsdp.sharding.quantized_linear`)."""

PLANNED = ("prefetch", "reduce_lag", "max_unsharded", "max_activations")
"""Options that a plan chooses or does not use."""

LOWERINGS = ("inductor", "stitched", "whole", "eager")


@dataclass(frozen=True)
class Options:
    """The backend's options, checked. See ``torch.compile(model, backend="mfsdp", options={...})``: one field per
    option, as torch passes a flat mapping.

    Raises:
        ValueError: an unknown option, or a value out of range; the message lists what is valid.
    """

    prefetch: int | str = 1
    """Units by which a gather is launched early; 0 turns prefetch off. ``"auto"``: the cost model chooses 0 to 4 for
    each program (`mfsdp.cost_model.auto_prefetch`); 1 where the hardware is unknown."""
    reduce_lag: int = 1
    """Reductions that may be in flight behind compute; 0 waits at once."""
    max_unsharded: int | None = None
    """Limit in bytes on gathered parameters that are live at once. Prefetch yields to it."""
    memory: int | str | None = None
    """Bytes of device memory that a rank may take, or text, ``"70GB"``. Compilation chooses recomputed, gathered and
    offloaded layers, ``prefetch`` and ``reduce_lag`` for the fastest step that fits, the same on all ranks
    (`mfsdp.plan`). It assumes AdamW."""
    max_activations: int | None = None
    """Bytes of activations that may live longer at each launch of another parallelism's collective, for compute that
    moves behind it (`passes.hide_collectives`); ``None``: no limit."""
    pool: bool = True
    """Whether gathered buffers and gradient buffers are static buffers."""
    keep_cast: bool = True
    """Whether a shard's cast to the communication dtype persists from one optimizer step to the next. No effect on
    int8, which is quantized for every gather."""
    quantize: bool = True
    """Whether weights that the model casts to one byte per element (FP8) are cast before their all-gather."""
    interleave: bool = False
    """Whether the microbatches of one program alternate at its units (`mfsdp.together` sets it)."""
    split_backward: bool = False
    """Whether backward is two programs, gradients of inputs and then gradients of weights, which a zero-bubble schedule
    runs later (`mfsdp.PipelineStage`). AOTAutograd's cache is off."""
    nccl_ub: bool = False
    """Megatron-FSDP's: NCCL allocates static buffers and registers them as user buffers
    (`mfsdp.runtime.user_buffers`). Has not run on a GPU."""
    disable_symmetric_registration: bool = False
    """Megatron-FSDP's: registers them without symmetric windows. No effect without ``nccl_ub``, as there."""
    lowering: str = "inductor"
    """``"inductor"`` is ``"stitched"``: Inductor compiles each kind of subgraph of compute once, and a driver runs the
    schedule. ``"whole"``: one Inductor graph per program. ``"eager"``: ATen kernels one by one, the reference."""
    cuda_graph: str | None = None
    """``"programs"``: CUDA graphs replay the compute of forward and backward (`mfsdp.runtime.program_graphs`), as
    ``mode="reduce-overhead"`` does. Has not run on a GPU. A whole step: `mfsdp.capture_step`."""
    check: bool = True
    """Whether the verifier runs after every pass, and Inductor's code is compared with the listing."""
    patience: float | None = 120.0
    """Seconds before a stalled collective is reported on every rank, with the ranks that have not arrived; ``None``:
    never. A process has one watchdog; the model compiled last sets its options."""
    on_stall: str = "report"
    """``"report"``, or ``"raise"``: a stalled collective ends the run on every rank, with that report."""
    check_finite: int = 0
    """Interval in steps of checks of weights, units' results and gradients for Inf and NaN; every rank reports the
    first; 0: never (`mfsdp.runtime.runtime_checks`)."""
    check_replicas: int = 0
    """Interval in steps of comparisons of weights that several ranks should hold equal; 0: never."""
    frames: bool = False
    """Whether operations always run in Python frames named after them and their units (``all_gather layers.3``), for
    py-spy and debuggers; by default only while an observer is active. Costs host time."""
    dump: str | None = None
    """Folder for the listings; default: the environment variable ``MFSDP_DUMP``."""
    upto: str | None = None
    """Name of the pass after which the pipeline stops (for tests and bisection)."""
    passes: Sequence[tuple[str, Callable[..., None]]] | None = None
    """A table of passes that replaces the pipeline, ``(*mfsdp.pipeline.PIPELINE, ("mine", my_pass))``; rows of the
    pipeline itself obey the options above."""

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Returns options from the mapping that ``torch.compile`` passes on."""
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
        for name in (name for name, default in valid.items() if isinstance(default, bool)):
            value = getattr(out, name)
            if not isinstance(value, bool):
                raise ValueError(f"option {name}={value!r}: choose True or False")
        if out.cuda_graph not in (None, "programs"):
            step = "; call mfsdp.capture_step(step, model, optimizer), which knows the whole step"
            raise ValueError(
                f"option cuda_graph={out.cuda_graph!r}: choose 'programs' or None"
                + (step if out.cuda_graph == "step" else "")
            )
        if out.cuda_graph and (not out.pool or out.lowering not in ("inductor", "stitched")):
            raise ValueError(
                "option cuda_graph='programs': graphs replay subgraphs that Inductor has compiled, at the addresses of "
                f"static buffers; leave out pool={out.pool} and lowering={out.lowering!r}"
            )
        if out.nccl_ub and not out.pool:
            raise ValueError("option nccl_ub=True: NCCL registers static buffers; leave pool=False out")
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
        """Returns the options with the choices of a plan."""
        return replace(self, **chosen)  # type: ignore[arg-type]

    @property
    def folder(self) -> str | None:
        """The folder for listings, or ``None``."""
        return os.fspath(self.dump) if self.dump else os.environ.get("MFSDP_DUMP") or None
