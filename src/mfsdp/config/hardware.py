"""What a machine can do, as numbers: for planning. No torch.

Peaks are the makers' (dense, without sparsity), from NVIDIA's data sheets for A100, H100, H200 and HGX B200; networks
are those of the makers' reference systems, eight GPUs a node and one network card for each: HDR 200 Gb/s for A100, NDR
400 Gb/s for the others. GB200 is one of the 72 of an NVL72 rack, its figures the rack's divided by 72. Links to the
host are what copies have reached: nvbandwidth reports 25.1 GB/s on A100 (PCIe 4, NVIDIA/nvbandwidth#42) and 55.6 on
H100 (PCIe 5, NVIDIA's page of the tool), which H200 and B200, in the same slot, are taken to reach; two GPUs of GB200
share 450 GB/s each way to their Grace, of which 0.77 are taken to be reached, as GH200 does (346 GB/s, #23). What is
reached of a peak, latencies, and what collectives take from computation, are assumptions, said beside their fields:
give a file with your own, or a profile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Link:
    """What connects two ranks.

    Raises:
        ValueError: a rate that is not positive, or another field that is negative.
    """

    bandwidth: float
    """Bytes per second, one way, of one rank."""
    latency: float
    """Seconds of one hop."""
    cpu: float = 0.0
    """Seconds per byte that moving it takes from computation: gloo's copies on the same core; 0 for NVLink."""
    restart: float = 0.0
    """What a transfer that finds its group idle takes longer, as a part of its time: gloo's handshake stands behind the
    data of the one before. 0 for NCCL."""
    slows: float = 0.0
    """What computation loses of its speed while bytes move, however fast they do: NCCL's kernels take multiprocessors,
    and their bytes bandwidth of memory. 0 for copies by an engine of their own."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, (int, float)) or value < 0 or (name == "bandwidth" and value <= 0):
                raise ValueError(f"Link: {name}={value!r}: give a positive number")
        if self.slows >= 1:
            raise ValueError(f"Link: slows={self.slows!r}: give the part of its speed that computation loses, below 1")


@dataclass(frozen=True)
class Hardware:
    """One rank of a cluster, and its links."""

    name: str
    flops: Mapping[str, float]
    """Peak floating-point operations per second of matrix products, by dtype: ``f32``, ``bf16``, ..."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    inside: Link
    """Between ranks of a node."""
    between: Link
    """Between nodes."""
    ranks_per_node: int = 8
    domain: int = 0
    """Ranks that ``inside`` connects, if they are not those of a node: 72 of an NVL72 rack, whose nodes have four. 0:
    ``ranks_per_node``."""
    host: Link = Link(25e9, 1e-5)
    """Between a rank's memory and pinned memory of its host, in each direction, both at once: what copies reach."""
    reached: float = 0.7
    """What matrix products reach of their peak. An assumption: large bf16 products on H100 measure 0.6 to 0.75."""
    reached_bandwidth: float = 0.85
    """What other kernels, and collectives, reach of theirs. An assumption."""
    kernel: float = 4e-6
    """Seconds that the smallest kernel takes. An assumption."""
    launch: float = 0.0
    """Seconds that the host takes to launch a kernel of compiled code, and is ahead of the device or not; 0: the
    processor computes itself, and ``kernel`` has it."""
    dispatch: float = 0.0
    """The same of an operator that is called from Python (``lowering="eager"``)."""
    cuda: bool = False
    """Whether ranks are CUDA devices: products of 16-bit matrices can be written in float32 (`ops.widens`), optimizers
    work on all tensors at once, and what no ledger counts takes some of the memory."""
    fixed: int = 0
    """Bytes of ``memory`` that are taken before the first tensor: context, communicators, libraries
    (`mfsdp.cost_model.machine.fixed`); 0: not known."""
    host_memory: int = 0
    """Bytes of its host's memory that a rank may pin, which bound what a plan puts there; 0: not known, no bound."""

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "ranks_per_node", "reached", "reached_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Hardware: {name}={getattr(self, name)!r} must be positive")
        for name in ("kernel", "launch", "dispatch", "fixed", "host_memory"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"Hardware: {name}={getattr(self, name)!r} must not be negative")
        if isinstance(self.domain, bool) or not isinstance(self.domain, int) or self.domain < 0:
            raise ValueError(f"Hardware: domain={self.domain!r}: give a number of ranks, or 0 for ranks_per_node")
        if not isinstance(self.cuda, bool):
            raise ValueError(f"Hardware: cuda={self.cuda!r}: choose true or false")
        if not self.flops or any(not x > 0 for x in self.flops.values()):
            raise ValueError(f"Hardware: flops={dict(self.flops)!r}: give a positive number for at least one dtype")

    @property
    def linked(self) -> int:
        """Ranks that ``inside`` connects."""
        return self.domain or self.ranks_per_node

    def peak(self, dtype: str) -> float:
        """Operations per second in a dtype; in one that is not known, those of the widest that is."""
        return self.flops.get(dtype) or self.flops.get("f32") or min(self.flops.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `hardware` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


SLOWS = 0.16
"""What a GPU's computation loses of its speed beside collectives. An assumption, the same for all: training of GPT and
Llama on four GPUs computed 18.9% longer where it overlapped with communication, on average over H100, A100, MI250 and
MI210 (arXiv:2507.03114)."""

PINNED = 200_000_000_000
"""Bytes of its host's memory that a rank may pin: eight share 2 TB in NVIDIA's DGX A100 to B200 (datasheets), and 72
share 17 TB in an NVL72 rack. An assumption: a fifth of that is for processes and what loads data."""

LAUNCH, DISPATCH = 5e-6, 1e-5
"""What a GPU's host takes for a kernel. Assumptions."""


def _gpu(
    name: str, f64: float, f32: float, bf16: float, f8: float | None, memory: float, bandwidth: float, nvlink: float,
    network: float, host: float, **more: int,
) -> Hardware:  # fmt: skip
    flops = {"f64": f64, "f32": f32, "bf16": bf16, "f16": bf16}
    if f8 is not None:
        flops["f8"] = f8
    inside, between = Link(nvlink, 2e-6, slows=SLOWS), Link(network, 6e-6, slows=SLOWS)
    return Hardware(
        name, flops, int(memory), bandwidth, inside, between, host=Link(host, 1e-5), cuda=True, launch=LAUNCH,
        dispatch=DISPATCH, host_memory=PINNED, **more,
    )  # fmt: skip


KNOWN = {
    "a100": _gpu("A100 SXM 80 GB", 19.5e12, 19.5e12, 312e12, None, 80e9, 2.039e12, 300e9, 25e9, 25e9),
    "h100": _gpu("H100 SXM", 67e12, 67e12, 989e12, 1979e12, 80e9, 3.35e12, 450e9, 50e9, 55e9),
    "h200": _gpu("H200 SXM", 67e12, 67e12, 989e12, 1979e12, 141e9, 4.8e12, 450e9, 50e9, 55e9),
    "b200": _gpu("HGX B200", 37e12, 75e12, 2250e12, 4500e12, 180e9, 7.7e12, 900e9, 50e9, 55e9),
    "gb200": _gpu(
        "GB200 NVL72", 40e12, 80e12, 2500e12, 5000e12, 186e9, 8e12, 900e9, 50e9, 173e9, ranks_per_node=4, domain=72
    ),
}
"""By name."""


def hardware(what: str | os.PathLike[str] | Hardware | Mapping[str, Any]) -> Hardware:
    """Hardware by name, from a JSON file with the fields of `Hardware`, or as it is.

    A file may say ``"like": "h100"`` and give only what differs.

    Raises:
        ValueError: there is none of that name, or a field is wrong; says which there are.
    """
    if isinstance(what, Hardware):
        return what
    if isinstance(what, Mapping):
        return _parse(dict(what), "the mapping")
    if isinstance(what, str) and what.lower() in KNOWN:
        return KNOWN[what.lower()]
    path = Path(what)
    if not path.is_file():
        raise ValueError(f"hardware={str(what)!r}: neither a file nor one of {', '.join(KNOWN)}, this (measured)")
    try:
        return _parse(json.loads(path.read_text()), str(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"hardware: {path} is no JSON: {error}") from error


def _parse(given: dict[str, Any], where: str) -> Hardware:
    like = given.pop("like", None)
    if like is not None and like not in KNOWN:
        raise ValueError(f"hardware: {where} is like {like!r}, which is none of {', '.join(KNOWN)}")
    known = [f.name for f in fields(Hardware)]
    wrong = sorted(set(given) - set(known))
    if wrong:
        raise ValueError(f"hardware: {where} has the unknown fields {', '.join(wrong)}; there are {', '.join(known)}")
    try:
        for name in ("inside", "between", "host"):
            if name in given:
                given[name] = Link(**given[name])
        return replace(KNOWN[like], **given) if like else Hardware(**given)
    except TypeError as error:
        raise ValueError(f"hardware: {where}: {error}") from error


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, as far as their links go. A node is here what `Hardware.domain` connects."""

    ranks: int
    nodes: int
    """How many nodes they are on."""
    fewest: int
    """How many are on the node with the fewest: all of the ring passes through its network cards."""

    @staticmethod
    def of(ranks: range, per_node: int) -> Group:
        """A group by its ranks, which are numbered node by node."""
        shares = Counter(rank // per_node for rank in ranks)
        return Group(len(ranks), len(shares), min(shares.values()))


@dataclass(frozen=True)
class Transfer:
    """What a collective costs, alone."""

    fixed: float
    """Seconds that do not depend on bytes."""
    moving: float
    """Seconds of moving bytes, at the full rate of the link."""
    cpu: float = 0.0
    """Seconds that it takes from computation."""
    restart: float = 0.0
    """Seconds that it takes longer if its group was idle."""
    link: str = "inside"
    """Which link is the bottleneck, and so shared with others: ``"inside"`` nodes or ``"between"`` them, to the
    ``"host"`` or ``"host back"``."""

    @property
    def seconds(self) -> float:
        return self.fixed + self.moving


def transfer(kind: str, nbytes: float, group: Group, machine: Hardware) -> Transfer:
    """A collective over a group.

    Ring algorithms (Patarasuk and Yuan, 2009; the bus bandwidths of nccl-tests, doc/PERFORMANCE.md): every rank sends
    (n-1)/n of the whole in a gather or a reduce-scatter, twice that in an all-reduce, in n-1 hops or twice as many. A
    node's ranks in the group drive one network card each, so that the ring runs at the slower of the link inside and of
    all these cards together, on the node that has the fewest. A small all-reduce goes through a tree instead, in
    2 log2(nodes) hops.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        nbytes: of the whole: what is gathered, or what is reduced.
        group: who takes part.
        machine: whose links.
    """
    n, nodes = group.ranks, group.nodes
    if n <= 1:
        return Transfer(0.0, 0.0)
    times = 2 if kind == "all_reduce" else 1
    rates = [machine.inside.bandwidth] if n > nodes else []
    rates += [machine.between.bandwidth * group.fewest] if nodes > 1 else []
    rate = min(rates) * machine.reached_bandwidth
    sent = times * nbytes * (n - 1) / n
    across = 0 if nodes == 1 else min(nodes, n - 1)
    hops = times * ((n - 1 - across) * machine.inside.latency + across * machine.between.latency)
    link = "between" if nodes > 1 else "inside"
    slowest = machine.between if nodes > 1 else machine.inside
    cpu, restart = slowest.cpu * sent, slowest.restart * sent / rate
    ring = Transfer(hops, sent / rate, cpu + slowest.slows * sent / rate, restart, link)
    if kind != "all_reduce":
        return ring
    depth, within = (nodes - 1).bit_length(), -(-n // nodes)
    climb = 2 * depth * machine.between.latency + 2 * (within - 1) * machine.inside.latency
    tree = Transfer(climb, 2 * nbytes / rate, cpu + slowest.slows * 2 * nbytes / rate, restart, link)
    return min(ring, tree, key=lambda t: t.seconds)


def host_copy(nbytes: float, machine: Hardware, back: bool = False) -> Transfer:
    """A copy from a rank's memory to its host, or back. Copies of one direction share its link, of both they do not."""
    moving = nbytes / machine.host.bandwidth
    taken = machine.host.cpu * nbytes + machine.host.slows * moving
    return Transfer(machine.host.latency, moving, taken, link="host back" if back else "host")


def undisturbed(machine: Hardware) -> Hardware:
    """The same, where neither what moves nor launching takes anything from computation: where that is in its times."""
    return replace(
        machine,
        launch=0.0,
        dispatch=0.0,
        **{name: replace(getattr(machine, name), cpu=0.0, slows=0.0) for name in ("inside", "between", "host")},
    )
