"""Hardware as numbers, for planning. No torch.

Peaks are the vendors' (dense), from NVIDIA's data sheets for A100, H100, H200 and HGX B200. Networks are those of the
vendors' reference systems, eight GPUs per node with one network card each: HDR 200 Gb/s for A100, NDR 400 Gb/s for the
others. GB200 has a 72nd of an NVL72 rack's figures.

Host links have the bandwidth that copies reach: nvbandwidth reports 25.1 GB/s on A100 (PCIe 4, NVIDIA/nvbandwidth#42)
and 55.6 on H100 (PCIe 5, NVIDIA's page of the tool), also assumed for H200 and B200 in the same slot. Two GPUs of GB200
share 450 GB/s each way to their Grace; 0.77 of it is assumed, as GH200 reaches (346 GB/s, #23).

Reached fractions of peaks, latencies, and compute lost to collectives are assumptions, documented at their fields. A
file or a profile can replace them.
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
    """A connection between two ranks.

    Raises:
        ValueError: the bandwidth is not positive, another field is negative, or ``slows`` is not below 1.
    """

    bandwidth: float
    """Bytes per second of one rank, one way."""
    latency: float
    """Seconds per hop."""
    cpu: float = 0.0
    """Seconds of compute lost per byte: gloo copies on the same core; 0 for NVLink."""
    restart: float = 0.0
    """Extra time of a transfer whose group was idle, as a fraction of its transfer time: gloo's handshake, which
    otherwise overlaps with the previous transfer. 0 for NCCL."""
    slows: float = 0.0
    """Fraction of its speed that compute loses while bytes move, at any rate: NCCL kernels occupy multiprocessors, and
    their bytes memory bandwidth. 0 for copy engines."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, (int, float)) or value < 0 or (name == "bandwidth" and value <= 0):
                raise ValueError(f"Link: {name}={value!r}: give a positive number")
        if self.slows >= 1:
            raise ValueError(f"Link: slows={self.slows!r}: give the part of its speed that computation loses, below 1")


@dataclass(frozen=True)
class Hardware:
    """One rank of a cluster, and its links. Its fields are the keys of a hardware file, which is flat, so that a file
    can give only those that differ.
    """

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
    """Ranks that ``inside`` connects, if not those of a node: 72 in an NVL72 rack, whose nodes have four. 0:
    ``ranks_per_node``."""
    host: Link = Link(25e9, 1e-5)
    """Between a rank's memory and pinned host memory, in each direction, both at once: the rate that copies reach."""
    reached: float = 0.7
    """Fraction of the peak that matrix products reach. An assumption: large bf16 products on H100 reach 0.6 to 0.75."""
    reached_bandwidth: float = 0.85
    """Fraction of the bandwidth that other kernels and collectives reach. An assumption."""
    kernel: float = 4e-6
    """Seconds of the smallest kernel. An assumption."""
    launch: float = 0.0
    """Seconds that the host takes to launch a kernel of compiled code, ahead of the device or not; 0: the CPU computes,
    and ``kernel`` includes it."""
    dispatch: float = 0.0
    """The same for an operator called from Python (``lowering="eager"``)."""
    cuda: bool = False
    """Whether ranks are CUDA devices: 16-bit matrix products can be written in float32 (`ops.widens`), optimizers work
    on all tensors at once, and some memory is in no ledger."""
    fixed: int = 0
    """Bytes of ``memory`` taken before the first tensor: context, communicators, libraries
    (`mfsdp.cost_model.machine.fixed`); 0: unknown."""
    host_memory: int = 0
    """Bytes of host memory that a rank may pin, the limit for plans; 0: unknown, no limit."""

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
        """Returns operations per second in a dtype; if it is not listed, those of f32, or else the lowest."""
        return self.flops.get(dtype) or self.flops.get("f32") or min(self.flops.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file that `hardware` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


SLOWS = 0.16
"""Fraction of its speed that a GPU's compute loses beside collectives. Assumed equal for all GPUs: training of GPT and
Llama on four GPUs computed 18.9% longer where it overlapped with communication, on average over H100, A100, MI250 and
MI210 (arXiv:2507.03114)."""

PINNED = 200_000_000_000
"""Bytes of host memory that a rank may pin: eight ranks share 2 TB in NVIDIA's DGX A100 to B200, 72 share 17 TB in an
NVL72 rack (data sheets). Assumes that a fifth remains for processes and data loading."""

LAUNCH, DISPATCH = 5e-6, 1e-5
"""Host seconds per kernel, compiled and eager, on GPUs. Assumptions."""


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
"""Known hardware by name."""


def hardware(what: str | os.PathLike[str] | Hardware | Mapping[str, Any]) -> Hardware:
    """Returns hardware by name, from a JSON file or a mapping with the fields of `Hardware`, or as given.

    A file may contain ``"like": "h100"`` and only the fields that differ.

    Raises:
        ValueError: the name or a field is unknown (the message lists the valid ones), or a value is wrong.
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
    """The ranks of a collective, as far as links matter. Here a node is the ranks that `Hardware.inside` connects."""

    ranks: int
    nodes: int
    """Number of nodes."""
    fewest: int
    """Ranks on the node with the fewest: the whole ring passes through that node's network cards."""

    @staticmethod
    def of(ranks: range, per_node: int) -> Group:
        """Returns the group of these ranks, which are numbered node by node."""
        shares = Counter(rank // per_node for rank in ranks)
        return Group(len(ranks), len(shares), min(shares.values()))


@dataclass(frozen=True)
class Transfer:
    """Cost of one transfer, alone on its link."""

    fixed: float
    """Seconds that do not depend on bytes."""
    moving: float
    """Seconds to move the bytes, at the link's full rate."""
    cpu: float = 0.0
    """Seconds of compute lost."""
    restart: float = 0.0
    """Extra seconds if its group was idle."""
    link: str = "inside"
    """The bottleneck link, shared with others: ``"inside"`` nodes, ``"between"`` nodes, ``"host"``, ``"host back"``."""

    @property
    def seconds(self) -> float:
        return self.fixed + self.moving


def transfer(kind: str, nbytes: float, group: Group, machine: Hardware) -> Transfer:
    """Returns the cost of a collective over a group.

    Ring algorithms (Patarasuk and Yuan, 2009; the bus bandwidths of nccl-tests, doc/PERFORMANCE.md): every rank sends
    (n-1)/n of the bytes in a gather or reduce-scatter, in n-1 hops; twice both in an all-reduce. Each rank on a node
    drives one network card, so the ring runs at the slower of the link inside and all these cards together, on the node
    with the fewest ranks. A small all-reduce uses a tree, in 2 log2(nodes) hops.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        nbytes: bytes of the full buffer that is gathered or reduced.
        group: the ranks.
        machine: the hardware.
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


def message(nbytes: float, machine: Hardware, across: bool) -> Transfer:
    """Returns the cost of a message to another rank; ``across``: of another node."""
    link = machine.between if across else machine.inside
    moving = nbytes / (link.bandwidth * machine.reached_bandwidth)
    taken = link.cpu * nbytes + link.slows * moving
    return Transfer(link.latency, moving, taken, link.restart * moving, "between" if across else "inside")


def host_copy(nbytes: float, machine: Hardware, back: bool = False) -> Transfer:
    """Returns the cost of a copy to the host, or back. Copies share a link only with copies in the same direction."""
    moving = nbytes / machine.host.bandwidth
    taken = machine.host.cpu * nbytes + machine.host.slows * moving
    return Transfer(machine.host.latency, moving, taken, link="host back" if back else "host")


def undisturbed(machine: Hardware) -> Hardware:
    """Returns the hardware without compute time lost to transfers or launches, for measured times that include it."""
    return replace(
        machine,
        launch=0.0,
        dispatch=0.0,
        **{name: replace(getattr(machine, name), cpu=0.0, slows=0.0) for name in ("inside", "between", "host")},
    )
