"""Process groups and their store, through which ranks communicate outside of programs."""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..config.units import Axis

T = TypeVar("T")


def initialized() -> bool:
    """Whether there is a default group."""
    return dist.is_available() and dist.is_initialized()


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. Private in torch; tried on 2.11 to 2.15."""
    try:
        return c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(
            f"process group {name!r} is not there. Initialise torch.distributed before the first step, "
            "and do not destroy or recreate the group that the model was sharded over."
        ) from error


def told_of_launcher() -> None:
    """Warns if torchrun has started several processes without a default group: each would train on its own."""
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1" and not initialized():
        warnings.warn(
            f"mfsdp: a launcher has started {started} processes (WORLD_SIZE), and torch.distributed is not "
            "initialised: this one shards over itself, and trains by itself. Call "
            "torch.distributed.init_process_group() before fully_shard.",
            stacklevel=4,
        )


def default() -> dist.ProcessGroup | None:
    """The default group, ``None`` if there is none."""
    return dist.group.WORLD if initialized() else None


def world() -> int:
    """Ranks of the default group, 1 without one."""
    return dist.get_world_size() if initialized() else 1


def alone() -> bool:
    """Whether there are no other ranks that exist."""
    return world() == 1 or dist.get_backend() == "fake"


def rank() -> int:
    """This process's rank in the default group, 0 without one."""
    return dist.get_rank() if initialized() else 0


def default_group() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def ranks(name: str) -> list[int]:
    """The ranks of a group, in its order."""
    return dist.get_process_group_ranks(process_group(name))


def axis_of(name: str) -> Axis:
    """A group's ranks as an axis, named after the mesh axis if there is one. Private in torch (``group_desc``); tried
    on 2.11 to 2.15.
    """
    members = ranks(name)
    desc = str(getattr(process_group(name), "group_desc", "") or "")
    known = desc.removeprefix("mesh_") if desc.startswith("mesh_") else "world" if name == default_group() else name
    stride = members[1] - members[0] if len(members) > 1 else 1
    return Axis(known.replace(" ", "_"), name, len(members), stride)


def as_mesh(group: object, device: str, name: str) -> DeviceMesh | None:
    """A process group as a mesh of one axis over a device type; ``None`` for other objects. Cached."""
    if not isinstance(group, dist.ProcessGroup):
        return None
    key = str(group.group_name), device
    if key not in _meshes or _meshes[key][0]() is not group:
        mesh = DeviceMesh.from_group(group, "cpu" if device == "meta" else device, mesh_dim_names=(name,))
        _meshes[key] = weakref.ref(group), mesh
    return _meshes[key][1]


def lanes_of(name: str, device: str) -> tuple[str, str]:
    """Names of two groups over a group's ranks, for gathers and for reductions: collectives of one group are serial,
    those of two overlap. Over NCCL both are new, with high-priority streams, so that nothing waits for a user's
    collective or for the blocks of a running matmul. Over gloo, gathers use the group itself. All its ranks call
    together; cached per device type.

    Raises:
        RuntimeError: ranks know different numbers of groups, so names would differ.
    """
    group = process_group(name)
    found = _lanes.get((name, device))
    if found is None or found[0]() is not group:
        nccl = _nccl_of(group, device)
        gathers = _another(group, "mfsdp_gather", device, nccl) if nccl else name
        lanes = gathers, _another(group, "mfsdp_reduce", device, nccl)
        found = _lanes[name, device] = (weakref.ref(group), lanes)
    return found[1]


def other_of(name: str) -> str | None:
    """The reduction group that `lanes_of` made beside a gather group, or ``None``."""
    return next((lanes[1] for made, lanes in _lanes.values() if lanes[0] == name and made() is not None), None)


def gathers_of(name: str, device: str) -> str:
    """The group for gathers over a group's ranks; the group itself without another."""
    found = _lanes.get((name, device))
    return name if found is None or found[0]() is not process_group(name) else found[1][0]


def _one_name(name: str, ranks: Sequence[int], hashed: bool) -> None:
    """Makes sure that the next group has one name on all its ranks, which find each other by it. torch derives it from
    a count of groups made, here raised to these ranks' maximum (from torch 2.14 on groups of only some ranks count
    too), or, if hashed and before 2.14, from how many groups a rank is in. Private in torch (``_world``,
    ``_hash_ranks_to_str``); tried on 2.12 to 2.14, not on the others of 2.11 to 2.15.
    """
    world = c10d._world
    others = others_that_differ(name, [f"{world.group_count}"])
    world.group_count = max([world.group_count, *(int(made) for (made,) in others.values())])
    if not hashed:
        return
    known, mine = len(world.pg_names), c10d._hash_ranks_to_str(list(ranks))
    for other, (theirs, count) in others_that_differ(name, [mine, f"{known}"]).items():
        if theirs != mine:
            raise RuntimeError(
                f"mfsdp: rank {dist.get_rank()} is in {known} process groups, rank {other} in {count}: a new one would "
                "have different names on them, and they would wait for each other. Make groups of your own that only "
                "some of these ranks are in after fully_shard."
            )


def _nccl_of(group: dist.ProcessGroup, device: str) -> str:
    """A group's NCCL backend for a device type: ``"nccl"`` (torch 2.15 makes it ``"nccl2"``), ``"nccl2"``,
    ``"nccl-lazy"`` or ``"nccl-legacy"``; ``""`` for none.
    """
    backends = (each.split(":") for each in dist.get_backend_config(group).split(","))
    return next((name for kind, name in backends if kind == device and name.startswith("nccl")), "")


def _another(group: dist.ProcessGroup, desc: str, device: str, nccl: str) -> str:
    """Name of a new group over the same ranks; only they call. If the default group is bound to a device (eager NCCL,
    and every ``"nccl2"``), `new_group` splits its communicator, which needs a call on all its ranks. Then a smaller
    group is split from ``group``, by a backend of the same name, as torch demands.

    Args:
        nccl: its backend, from `_nccl_of`; ``""``: the default group's.
    """
    options = None
    ranks = dist.get_process_group_ranks(group)
    everybody = len(ranks) == dist.get_world_size()
    _one_name(str(group.group_name), ranks, hashed=not everybody)
    if nccl:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if not everybody and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
            return str(_split(group, f"{device}:{nccl}", pg_options=options, group_desc=desc).group_name)
    made = dist.new_group(
        ranks,
        backend=nccl or None,
        pg_options=options,
        use_local_synchronization=not everybody,
        group_desc=desc,
    )
    return str(made.group_name)


def _split(group: dist.ProcessGroup, backend: str, **how: Any) -> dist.ProcessGroup:
    """A group split from all ranks of another one; only its ``backend``, where torch can split one alone (from 2.13 on;
    2.13 fails for groups created without explicit backends).
    """
    split: Any = dist.split_group
    everybody = [list(range(group.size()))]
    if "backend" in inspect.signature(dist.split_group).parameters:
        with suppress(ValueError):  # raised before any communication, on all ranks
            return split(group, everybody, backend=backend, **how)  # type: ignore[no-any-return]
    return split(group, everybody, **how)  # type: ignore[no-any-return]


_meshes: dict[tuple[str, str], tuple[weakref.ref[dist.ProcessGroup], DeviceMesh]] = {}
_lanes: dict[tuple[str, str], tuple[weakref.ref[dist.ProcessGroup], tuple[str, str]]] = {}


@contextmanager
def shared_by_copies() -> Iterator[None]:
    """Inside of the ``with``, ``copy.deepcopy`` shares process groups and meshes."""
    kinds: set[Any] = {dist.ProcessGroup, DeviceMesh, *((type(dist.group.WORLD),) if initialized() else ())}
    before = {kind: copyreg.dispatch_table.get(kind) for kind in kinds}
    copyreg.dispatch_table.update(dict.fromkeys(kinds, lambda group: ""))
    try:
        yield
    finally:
        for kind, reducer in before.items():
            if reducer is None:
                del copyreg.dispatch_table[kind]
            else:
                copyreg.dispatch_table[kind] = reducer


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """Simulates one rank of a job, for planning. Inside of the ``with`` meshes can be made, models sharded over them
    and passed to `mfsdp.explain` and `mfsdp.trace`. Collectives do nothing.

    Args:
        world: the number of ranks.
        rank: this process's rank.

    Raises:
        RuntimeError: torch.distributed is initialized: there is a real job.

    Private in torch (its backend ``"fake"``); tried on 2.11 to 2.15.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if initialized():
        raise RuntimeError("fake_ranks: torch.distributed is initialised; leave its groups, or plan in another process")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if initialized():
            dist.destroy_process_group()
        _meshes.clear()
        _forget_meshes()


def _forget_meshes() -> None:
    """Empties DTensor's caches, which take meshes of an ended job for equal ones of the next. Private in torch; tried
    on 2.13, and skipped where a version lacks one.
    """
    from torch.distributed.tensor import _redistribute, debug

    planned = getattr(_redistribute, "_gen_transform_infos", None)
    for clear in (getattr(debug, "_clear_sharding_prop_cache", None), getattr(planned, "cache_clear", None)):
        if clear is not None:
            clear()


# Communication through the store


def _store() -> dist.Store:
    """The default group's store, with a prefix. Private in torch (``_get_default_store``); tried on 2.11 to 2.15."""
    return dist.PrefixStore(_prefix(), c10d._get_default_store())


def _prefix() -> str:
    """The prefix of mfsdp's keys. torchrun restarts processes with the store of the previous ones (torch 2.13; not with
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``), whose keys must not be read. Agents of several nodes count restarts
    differently, so several nodes need that variable.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1"
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if alone else "0"
    return "mfsdp" if count == "0" else f"mfsdp/{count}"


def watch_store() -> dist.Store | None:
    """The store by another connection, for the watchdog's thread: one connection serves one call at a time. ``None`` if
    unavailable. Tried on 2.13; ``clone`` may be missing in others of 2.11 to 2.15.
    """
    clone = getattr(c10d._get_default_store(), "clone", None)
    if clone is None:
        return None
    try:
        return dist.PrefixStore(f"{_prefix()}/watch", clone())
    except RuntimeError:
        return None


def first_to_end() -> str:
    """The message of the first rank that an exception has ended; ``""`` for none."""
    try:
        return ask("watch/ended/1", 0.3) or ""
    except RuntimeError:  # the store ended with its process
        return ""


def tell(key: str, text: str) -> None:
    """Stores a text for other ranks."""
    _store().set(key, text)


def ask(key: str, seconds: float) -> str | None:
    """The stored text, or ``None`` after ``seconds``."""
    store = _store()
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        return None
    return str(store.get(key).decode())


def first_to_say(key: str, text: str) -> str:
    """The text of the first rank that called."""
    return str(_store().compare_set(key, "", text).decode())


def agreed(key: str, text: str) -> str:
    """The same, or ``text`` without other ranks."""
    return text if alone() else first_to_say(key, text)


def others_that_differ(group: str, lines: Sequence[str], patience: float = 600.0) -> dict[int, list[str]]:
    """The lines of a group's other ranks, by rank, where they differ from this one's. All its ranks call together.
    Costs a few messages through the store, and one with the lines if they differ.

    Raises:
        RuntimeError: a rank has not called within ``patience`` seconds.
    """
    if dist.get_backend(process_group(group)) == "fake":
        return {}  # there are no other ranks
    ranks, text = dist.get_process_group_ranks(process_group(group)), "\n".join(lines)
    store, me = _store(), dist.get_rank()
    _asked[group] = _asked.get(group, 0) + 1
    key = f"alike/{group}/{ranks[0]}/{_asked[group]}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    store.add(f"{key}/{digest}", 1)
    store.set(f"{key}/{me}", "")
    if store.add(f"{key}/arrived", 1) == len(ranks):
        store.set(f"{key}/all", "1")
    try:
        store.wait([f"{key}/all"], timedelta(seconds=patience))
    except (RuntimeError, dist.DistError) as error:
        missing = [r for r in ranks if not store.check([f"{key}/{r}"])]
        raise RuntimeError(
            f"mfsdp: rank {me} shards a model, and ranks {missing} have not come to the same call of fully_shard in "
            f"{patience:g} s: they shard other modules, raised, or died"
        ) from error
    if store.add(f"{key}/{digest}", 0) == len(ranks):
        return {}
    store.set(f"{key}/{me}/lines", text)
    said = {r: store.get(f"{key}/{r}/lines").decode().split("\n") for r in ranks}
    return {r: theirs for r, theirs in said.items() if theirs != list(lines)}


_asked: dict[str, int] = {}


def all_objects(mine: T) -> list[T]:
    """Every rank's small object, by rank of the default group, if there is one."""
    if world() == 1:
        return [mine]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, mine)
    return found


class Everybody:
    """The ranks of the default group, or this process alone; sends objects to and from the first rank."""

    def __init__(self) -> None:
        self.rank, self.world = rank(), world()

    def to_first(self, mine: T) -> list[T]:
        """Every rank's object, by rank, on the first rank; elsewhere nothing."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * (0 if self.rank else self.world)
        dist.gather_object(mine, found or None)
        return found

    def from_first(self, said: T) -> T:
        """The first rank's object, on all ranks."""
        if self.world == 1:
            return said
        found = [said]
        dist.broadcast_object_list(found)
        return found[0]


class SideChannel(Everybody):
    """The same for a thread beside training, over separate gloo connections, regardless of other backends. torch does
    not know of them, and ``destroy_process_group`` leaves them alone. All ranks make it together.

    Args:
        name: the same on all ranks, used once.

    Raises:
        RuntimeError: this torch has no gloo.
    """

    def __init__(self, name: str):
        super().__init__()
        if not dist.is_gloo_available():
            raise RuntimeError("mfsdp: this torch has no gloo, by which ranks tell each other what is behind training")
        store = dist.PrefixStore(name, _store())
        self._group: Any = dist.ProcessGroupGloo(store, self.rank, self.world, dist.default_pg_timeout)
        self._of = weakref.ref(dist.group.WORLD)

    def lasts(self) -> bool:
        """Whether the default group is still the same."""
        return self._of() is default()

    def to_first(self, mine: T) -> list[T]:
        if self.rank:
            self._send(mine, 0)
            return []
        return [mine, *(self._receive(rank) for rank in range(1, self.world))]

    def from_first(self, said: T) -> T:
        if self.rank:
            return self._receive(0)  # type: ignore[no-any-return]
        for rank in range(1, self.world):
            self._send(said, rank)
        return said

    def _send(self, mine: object, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        for part in (torch.tensor([content.numel()]), content):
            self._group.send([part], rank, 0).wait()

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], rank, 0).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([content], rank, 0).wait()
        return pickle.loads(content.numpy().tobytes())


def barrier() -> None:
    dist.barrier()


def broadcast(tensor: torch.Tensor, group: str, source: int = 0) -> torch.Tensor:
    """Broadcasts the tensor of one rank, by its index in the group, in place."""
    over = process_group(group)
    dist.broadcast(tensor, dist.get_global_rank(over, source), group=over)
    return tensor
