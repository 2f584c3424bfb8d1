"""Lightning integration: ``Trainer(strategy="mfsdp")`` after ``import mfsdp.integrations.lightning``.

    trainer = Trainer(strategy="mfsdp", devices=8)
    trainer = Trainer(strategy=MFSDPStrategy(units=[Block], strategy="optim_grads"), devices=8)

The strategy shards the `LightningModule` as one model before its optimizers are created. It compiles in place the
modules that ``training_step`` may call: ``self(...)``, and children such as ``self.model(...)``. Other computation in
``training_step`` is not compiled.

It extends Lightning's own strategy for FSDP2, and reads and writes that strategy's checkpoints. Tried with lightning
2.6.6 and pytorch-lightning 2.6.6; it uses the one that was imported, else the one that is installed. Private names that
it uses: ``_setup_distributed``, ``_device_mesh``, ``_layer_sync``, ``_save_distributed_checkpoint``, ``_trainer``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ..checkpoints.reading import Planner, Reader
from ..config.options import MixedPrecisionPolicy, Options
from ..dtensor.mesh import FOLDED, OTHERS
from ..sharding.contexts import no_sync, synchronize
from ..sharding.module import FSDPModule
from ..sharding.shard import fully_shard
from .compiling import is_compiled, not_compiled


def _package() -> str:
    """Returns the name of the Lightning package in use."""
    names = ("lightning", "pytorch_lightning")
    there = [n for n in names if n in sys.modules] or [n for n in names if importlib.util.find_spec(n)]
    if not there:
        raise ImportError("mfsdp.integrations.lightning: pip install lightning, or pytorch-lightning")
    return {"lightning": "lightning.pytorch"}.get(there[0], there[0])


_strategies = importlib.import_module(f"{_package()}.strategies")

POLICIES = {
    "32-true": None,
    "bf16-true": MixedPrecisionPolicy(main_params_dtype=None),
    "16-true": MixedPrecisionPolicy(main_params_dtype=None),
    "bf16-mixed": MixedPrecisionPolicy(compute_dtype=torch.bfloat16),
}
"""The policy for each ``Trainer(precision=)``; ``None``: the default. Lightning's plugins do the rest: they cast the
model (``-true``), or enter autocast (``-mixed``). Lightning offers a strategy of this kind no other precisions."""

_ASKED = "_mfsdp_lightning"
"""Attribute of a module that a strategy has sharded: the arguments."""

META = "meta.pt"
"""Marks a folder as a checkpoint of Lightning's; written last."""


class MFSDPStrategy(_strategies.ModelParallelStrategy):  # type: ignore[misc, name-defined]
    """Trains a `LightningModule` that mfsdp shards and compiles.

    ``configure_model`` is optional. It may build the model on the meta device, or call `mfsdp.fully_shard` itself.

    Args:
        mesh: a ``DeviceMesh``, or the sizes of its axes, ``{"dp_outer": 2, "dp_shard": 4}``; `mfsdp.fully_shard`
            documents the names. ``configure_model`` reads it as ``self.device_mesh``. Default: all ranks.
        options: of the backend ``"mfsdp"``.
        hold: ``Trainer(accumulate_grad_batches=)`` accumulates full gradients, in ``main_grads_dtype``, and
            communicates none before the last microbatch, as DDP and FSDP2 do. ``False``: strategies 2 and 3
            reduce-scatter every microbatch's gradients, and keep shards.
        save_distributed_checkpoint: checkpoints are folders to which each rank writes its part. ``False``: rank 0
            writes one file, with the keys of unsharded training.
        process_group_backend, timeout: of the process group, if it has to be created.
        sharding: other arguments of `mfsdp.fully_shard`: ``units`` (names are relative to the `LightningModule`),
            ``strategy``, ``mp_policy``, ... Two defaults differ: ``units="auto"``, and ``sync_module_states=True``: all
            ranks start from the first one's values, as under DDP.

    Raises:
        ValueError: an unknown option, an invalid size of an axis, a checkpoint plugin; in ``fit``: errors of
            `mfsdp.fully_shard`, an ``mp_policy`` beside ``Trainer(precision=)``, a module that is already compiled, or
            sharded differently.
        TypeError: an argument that neither the strategy nor `mfsdp.fully_shard` knows.
        NotImplementedError: ``Trainer(sync_batchnorm=True)``, and errors of `mfsdp.fully_shard`.
    """

    def __init__(
        self,
        *,
        mesh: DeviceMesh | Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        hold: bool = True,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **sharding: Any,
    ):
        given = {"process_group_backend": process_group_backend, **({} if timeout is None else {"timeout": timeout})}
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **given)
        Options.parse(options)
        valid = sorted(inspect.signature(fully_shard).parameters.keys() - {"module", "device"})
        unknown = sorted(sharding.keys() - set(valid))
        if unknown:
            raise TypeError(
                f"MFSDPStrategy does not know {', '.join(unknown)}; arguments of fully_shard are {', '.join(valid)}, "
                "its own are options, hold, save_distributed_checkpoint, process_group_backend, timeout"
            )
        if isinstance(mesh, Mapping) and not all(isinstance(n, int) and n > 0 for n in mesh.values()):
            raise ValueError(f"MFSDPStrategy: mesh={dict(mesh)!r}: sizes of axes are positive integers")
        self._mesh, self._options, self._hold = mesh, dict(options or {}), hold
        self._sharding = {"sync_module_states": True, **sharding}

    # Ranks

    def setup_environment(self) -> None:
        """Creates the process group and the mesh."""
        self._setup_distributed()
        if isinstance(self._mesh, DeviceMesh):
            self._device_mesh = self._mesh
        elif self._device_mesh is None:
            sizes = {"fsdp": self.world_size} if self._mesh is None else self._mesh
            names = tuple(sizes)
            self._device_mesh = init_device_mesh(self.root_device.type, tuple(sizes.values()), mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns the number of ranks with different data and this rank's number; ranks along axes that split tensors
        or sequences share data.
        """
        mesh = self.device_mesh
        names, at = mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.get_coordinate()
        replicas, rank = 1, 0
        for dim, name in enumerate(names):
            if name not in (*FOLDED, *OTHERS):
                replicas, rank = replicas * mesh.size(dim), rank * mesh.size(dim) + at[dim]
        return {"num_replicas": replicas, "rank": rank}

    # Model and optimizers

    def setup(self, trainer: Any) -> None:
        """Shards the module, compiles it in place, and creates its optimizers.

        Raises:
            ValueError, NotImplementedError: see the class.
        """
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:
            raise NotImplementedError(
                "strategy 'mfsdp' with sync_batchnorm=True: batch norms over ranks have not been tried in sharded "
                "models; leave it out, and every rank normalises its own batch"
            )
        module: Any = self.lightning_module
        policy = self._policy()
        wanted = self._sharding if policy is None else {**self._sharding, "mp_policy": policy}
        if isinstance(module, FSDPModule):
            _sharded_alike(module, wanted)
            module.reset_iter_state()  # an earlier fit may have ended inside a step
        else:
            not_compiled(module, "strategy 'mfsdp'", "MFSDPStrategy(options=)")
            self.precision_plugin.convert_module(module)
            units = None if any(isinstance(m, FSDPModule) for m in module.modules()) else "auto"
            fully_shard(module, mesh=self.device_mesh, device=self.root_device, **{"units": units, **wanted})
            module.__dict__[_ASKED] = wanted
        if self._hold and trainer.accumulate_grad_batches > 1:
            module.set_requires_gradient_sync(True, hold=True)  # now, so that the first step does not recompile
        for part in _called(module):
            part.compile(backend="mfsdp", options=self._options)
        module.to(self.root_device)  # moves metrics and sets `self.device`; parameters are there already
        self.model = module
        self.barrier()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _policy(self) -> MixedPrecisionPolicy | None:
        precision = self.precision_plugin.precision
        if precision not in POLICIES:
            raise ValueError(f"strategy 'mfsdp': precision={precision!r}: choose one of {', '.join(POLICIES)}")
        policy = POLICIES[precision]
        if policy is not None and self._sharding.get("mp_policy") is not None:
            raise ValueError(
                f"MFSDPStrategy(mp_policy=) and Trainer(precision={precision!r}) both say dtypes: leave out one of them"
            )
        return policy

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Disables gradient synchronization in every microbatch of a step but the last."""
        with no_sync(self.model, hold=self._hold):
            yield

    def teardown(self) -> None:
        """Finishes the collectives that an optimizer's step has launched early."""
        module, trainer = self.lightning_module, getattr(self.lightning_module, "_trainer", None)
        if isinstance(module, FSDPModule) and trainer is not None and not trainer.interrupted:
            synchronize(self.lightning_module)
        super().teardown()

    # Checkpoints

    def _refuse_io(self, io: object) -> None:
        raise ValueError(
            f"strategy 'mfsdp' writes checkpoints itself, and {type(io).__name__} would not be asked: leave out the "
            "plugin"
        )

    checkpoint_io = property(_strategies.ModelParallelStrategy.checkpoint_io.fget, _refuse_io)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores optimizers from the result of `load_checkpoint`: always."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state: DTensors, or, for one file, full tensors on rank 0."""
        return dict(get_model_state_dict(self.model, options=self._form()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's state by name; for one file, by the numbers of an unsharded ``state_dict``."""
        state: Any = get_optimizer_state_dict(
            self.model, getattr(optimizer, "_optimizer", optimizer), options=self._form()
        )
        if self._save_distributed_checkpoint or not state:
            return dict(state)
        numbers = {name: i for i, name in enumerate(n for g in state["param_groups"] for n in g["params"])}
        groups = [{**g, "params": [numbers[n] for n in g["params"]]} for g in state["param_groups"]]
        return {"state": {numbers[n]: s for n, s in state["state"].items()}, "param_groups": groups}

    def _form(self) -> StateDictOptions:
        whole = not self._save_distributed_checkpoint
        return StateDictOptions(full_state_dict=whole, cpu_offload=whole)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        """Writes a folder or a file. A folder that is overwritten is no checkpoint until it is complete."""
        if self.is_global_zero and self._save_distributed_checkpoint and Path(filepath).is_dir():
            Path(filepath, META).unlink(missing_ok=True)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the content of a checkpoint: a folder's, written on any number of ranks, as this rank's shards; a
        file's as full tensors.

        Raises:
            ValueError: there is no checkpoint.
            RuntimeError: keys are missing or unexpected, and the module's ``strict_loading`` is on.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_file():
            return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)  # type: ignore[no-any-return]
        if not (path / META).is_file():
            found = "there is nothing" if not path.exists() else f"its {META} is missing, so it is not complete"
            raise ValueError(f"strategy 'mfsdp': {path} is no checkpoint of Lightning's: {found}")
        reader = Reader(path)
        saved = list(reader.read_metadata().state_dict_metadata)
        kind = DefaultLoadPlanner if weights_only is False else Planner
        weights = get_model_state_dict(self.model)
        names = {_stem(k.removeprefix("state_dict."), weights) for k in saved if k.startswith("state_dict.")}
        there = {name: weights[name] for name in _agreed(weights, names, self.lightning_module.strict_loading)}
        dcp.load({"state_dict": there}, storage_reader=reader, planner=kind())
        read = {**torch.load(path / META, weights_only=weights_only), "state_dict": there}
        states = {key.split(".")[0] for key in saved if key.startswith("optimizer_")}
        if states and self.lightning_module.trainer.state.fn == "fit":
            self._as_many(len(states))
            read["optimizer_states"] = []
            for i, optimizer in enumerate(self.optimizers):
                state: Any = get_optimizer_state_dict(self.model, optimizer)
                dcp.load({f"optimizer_{i}": state}, storage_reader=reader, planner=kind())
                read["optimizer_states"].append(state)
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Sets the model's state: shards that `load_checkpoint` has read, or full tensors (rank 0's are used).

        Raises:
            RuntimeError: keys are missing or unexpected, and ``strict`` is on.
        """
        state = checkpoint["state_dict"]
        if any(isinstance(t, DTensor) for t in state.values()):
            # `load_checkpoint` has compared names
            set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))
            return
        both = _agreed(get_model_state_dict(self.model), state, strict)
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self.model, {name: state[name] for name in both}, options=whole)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Sets the state of optimizers in the same way.

        Raises:
            ValueError: the checkpoint has another number of optimizers, or of parameters or groups in one.
        """
        states = checkpoint["optimizer_states"]
        self._as_many(len(states))
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if any(isinstance(n, int) for g in state["param_groups"] for n in g["params"]):
                _load_whole(state, self.model, optimizer)
            else:
                set_optimizer_state_dict(self.model, optimizer, state)

    def _as_many(self, saved: int) -> None:
        if saved != len(self.optimizers):
            raise ValueError(
                f"strategy 'mfsdp': the checkpoint has {saved} optimizers, and configure_optimizers gives "
                f"{len(self.optimizers)}"
            )


def _sharded_alike(module: FSDPModule, wanted: Mapping[str, Any]) -> None:
    """Checks that a sharded module has this strategy's arguments."""
    was = module.__dict__.get(_ASKED)
    if was is None and wanted.keys() - {"sync_module_states"}:
        raise ValueError(
            f"strategy 'mfsdp': {type(module).__name__} has been sharded by mfsdp.fully_shard already: give "
            f"{', '.join(sorted(wanted.keys() - {'sync_module_states'}))} (precision= is an mp_policy) to that call, "
            "not to the strategy or the Trainer"
        )
    if was is not None and was != wanted:
        raise ValueError(
            f"strategy 'mfsdp': {type(module).__name__} has been sharded by a strategy with {dict(was)}, and is to be "
            f"with {dict(wanted)}. Use the same arguments and precision, or a new module and a checkpoint"
        )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yields uncompiled modules with parameters that ``training_step`` may call: the module itself, its children, and
    those of containers without a forward. A module that another one calls is part of that one's graph.
    """
    if not is_compiled(module):
        yield module
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from (m for m in _called(child) if m is not child)
        elif not is_compiled(child) and any(True for _ in child.parameters()):
            yield child


# State dicts


def _stem(key: str, names: Mapping[str, object]) -> str:
    """Returns the name that a key of torch.distributed.checkpoint belongs to; a dict (extra state) has several keys."""
    stem = key
    while stem not in names and "." in stem:
        stem = stem.rpartition(".")[0]
    return stem if stem in names else key


def _agreed(model: Iterable[str], saved: Iterable[str], strict: bool) -> list[str]:
    model, saved = dict.fromkeys(model), dict.fromkeys(saved)
    missing, unexpected = [n for n in model if n not in saved], [n for n in saved if n not in model]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"strategy 'mfsdp': the checkpoint is of another model: missing {missing}, unexpected {unexpected}. "
            "strict_loading=False in the LightningModule loads the rest"
        )
    return [n for n in model if n in saved]


def _load_whole(state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sets an optimizer's state from full tensors by number: a place in its groups, as in unsharded training, or among
    the model's parameters, as Lightning's strategies for FSDP write it.
    """
    names = {id(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters()}
    mine = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state["param_groups"]]
    if [len(g) for g in mine] != [len(g) for g in theirs]:
        raise ValueError(
            f"strategy 'mfsdp': the checkpoint's optimizer has groups of {[len(g) for g in theirs]} parameters, "
            f"configure_optimizers gives {[len(g) for g in mine]}"
        )
    numbers = [n for group in theirs for n in group]
    in_order = numbers == list(range(len(numbers)))
    called = dict(zip(numbers, [n for g in mine for n in g])) if in_order else dict(enumerate(names.values()))
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], mine)]
    if not state["state"]:  # torch would look for a device among the tensors
        places = iter(range(len(numbers)))
        groups = [{**group, "params": [next(places) for _ in group["params"]]} for group in groups]
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        return
    moments = {called[number]: values for number, values in state["state"].items()}
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=whole)


_strategies.StrategyRegistry.register("mfsdp", MFSDPStrategy, description="mfsdp: sharded by a compiler")
