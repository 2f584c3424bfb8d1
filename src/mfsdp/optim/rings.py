"""Which ranks hold which part of a parameter's matrices, under data parallelism and tensor parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..buffers.flat_buffer import FlatBuffer
from ..dtensor.mesh import flat
from ..dtensor.tp_shards import TPShard, concatenated, has_groups, runs_of
from ..runtime import groups
from .muon import Block, Muon
from .owners import Box, Matrix, Ring, held_rows

Seat = tuple[int, tuple[int, ...]]
"""What a place holds: its rank in the layout, and its coordinate in the mesh of tensor parallelism."""


def matrices_of(
    buffer: FlatBuffer, unit: int, slot: int, number: int, group: Mapping[str, Any], recipe: Muon
) -> list[Matrix]:
    """Returns the matrices of a parameter, with the ranks that hold them.

    Args:
        buffer: its flat buffer.
        unit: the buffer's index among those of the step.
        slot: the parameter.
        number, group: its parameter group.
        recipe: divides parameters into matrices.

    Raises:
        ValueError: it has no matrices, or ``split_sizes`` does not fit.
        NotImplementedError: tensor parallelism has cut its matrices in a way that whole ones cannot be put together.
    """
    name, piece = buffer.layout.slots[slot].name, buffer.pieces[slot]
    shape = buffer.layout.slots[slot].shape
    cut = [] if piece is None or group.get("blockwise") else [d for d in range(len(piece.shape)) if piece.factor(d) > 1]
    if piece is None or not cut or (len(piece.shape) == 3 and cut == [0]):  # experts of other ranks are theirs
        ring, seats = _rows_over(buffer)
        blocks = recipe.blocks(name, shape, group)
        parts = [list(_in_layout(buffer, slot, block, seats)) for block in blocks]
    else:
        blocks = recipe.blocks(name, piece.shape, group)
        _joinable(buffer, name, piece)
        ring, seats = _rows_and_pieces_over(buffer, piece)
        parts = [list(_in_pieces(buffer, slot, block, piece, seats)) for block in blocks]
    many = len(blocks) > 1
    return [
        Matrix(
            f"{name}[{i}]" if many else name, unit, slot, number, rows, columns, ring, tuple(sorted(held, key=_place))
        )
        for i, ((_, rows, columns), held) in enumerate(zip(blocks, parts, strict=True))
    ]


def _place(part: tuple[int, Box]) -> int:
    return part[0]


def _rows_over(buffer: FlatBuffer) -> tuple[Ring, list[Seat]]:
    """Returns the ranks over which data parallelism cuts a buffer's rows. HSDP: those of one replica."""
    placement, (gather, reduce, outer, outer_reduce) = buffer.placement, buffer.placement.groups
    if placement.copies is not None:
        coordinate = placement.copies.get_coordinate()
        assert coordinate is not None
        ranks = placement.copies.size()
        return Ring(outer_reduce or outer, outer, int(coordinate[0]), ranks, copies=True), [(0, ())] * ranks
    if placement.mesh.ndim == 1:
        name, other = (gather, reduce) if gather else (outer, outer_reduce)
        ring = Ring(other or name, name, placement.rank, placement.mesh.size())
        return ring, [(rank, ()) for rank in range(ring.size)]
    return _over(placement.mesh, 2)


def _rows_and_pieces_over(buffer: FlatBuffer, piece: TPShard) -> tuple[Ring, list[Seat]]:
    """Returns the ranks that together hold every part of a parameter that tensor parallelism has cut."""
    placement = buffer.placement
    if placement.mesh.size() == 1:
        return _over(piece.mesh, 0)
    return _over(concatenated(placement.mesh, piece.mesh), placement.mesh.ndim)


def _over(mesh: DeviceMesh, rows: int) -> tuple[Ring, list[Seat]]:
    """Returns the ranks of a mesh; its first ``rows`` axes cut rows, (shard) or (outer, shard), the others pieces."""
    one = flat(mesh, tuple(range(mesh.ndim)))
    name = str(one.get_group().group_name) if has_groups(one) else ""
    numbers = groups.ranks(name) if name else mesh.mesh.flatten().tolist()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    me = numbers.index(int(mesh.mesh[tuple(coordinate)]))
    return Ring(name, name, me, len(numbers)), _seats(mesh, rows, tuple(numbers))


@lru_cache(maxsize=64)
def _seats(mesh: DeviceMesh, rows: int, numbers: tuple[int, ...]) -> list[Seat]:
    """Returns what every rank of a mesh holds, in the order of ``numbers``."""
    where = dict(zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, mesh.shape)), strict=True))
    seats = []
    for rank in numbers:
        *outer, shard = where[rank][:rows] or (0,)
        seats.append((shard * mesh.size(0) + outer[0] if outer else shard, where[rank][rows:]))
    return seats


def _in_layout(buffer: FlatBuffer, slot: int, block: Block, seats: list[Seat]) -> Iterator[tuple[int, Box]]:
    """Yields the places that hold rows of a matrix of the local parameter."""
    row, rows, columns = block
    if buffer.placement.copies is not None:
        yield from ((place, Box(row * columns, 0, rows, 0, columns)) for place in range(len(seats)))
        return
    places = {rank: place for place, (rank, _) in enumerate(seats)}
    for rank, box in held_rows(buffer.layout, slot, row * columns, rows, columns):
        yield places[rank], box


def _in_pieces(
    buffer: FlatBuffer, slot: int, block: Block, piece: TPShard, seats: list[Seat]
) -> Iterator[tuple[int, Box]]:
    """Yields the places that hold parts of a matrix of the full parameter."""
    row, rows, _ = block
    places = {seat: place for place, seat in enumerate(seats)}
    for coordinate in dict.fromkeys(at for _, at in seats):
        along, ((column, columns),) = _runs(piece, coordinate)
        at = 0
        for start, n in along:
            low, high = max(start, row), min(start + n, row + rows)
            if low < high:
                local = (at + low - start) * columns
                for rank, box in held_rows(buffer.layout, slot, local, high - low, columns):
                    here = Box(box.start, box.row + low - row, box.rows, column, columns)
                    yield places[rank, coordinate], here
            at += n


def _joinable(buffer: FlatBuffer, name: str, piece: TPShard) -> None:
    """Raises NotImplementedError if other ranks' parts of a parameter do not follow from this rank's."""
    why = ""
    if len(piece.shape) != 2:
        why = "stacked matrices are cut inside"
    elif not all(_even(p) for p in buffer.pieces if p is not None):
        why = "its ranks have pieces of different sizes"
    elif any(len(_runs(piece, at)[1]) != 1 for at in _coordinates(piece.mesh)):
        why = "pieces are of several ranges of columns"
    elif any(piece.mesh.size(i) > 1 and p.is_replicate() for i, p in enumerate(piece.placements)):
        why = "its mesh cuts over one axis and replicates over another"
    elif not has_groups(piece.mesh):
        why = "its mesh has no process groups"
    if why:
        raise NotImplementedError(
            f"fully_shard_optimizer: Muon needs {name} whole, which tensor parallelism has cut, and {why}. Give its "
            "parameter group 'blockwise': True, which steps each rank's piece as a matrix of its own (other results), "
            "or give the parameter to AdamW"
        )


@cache
def _runs(piece: TPShard, coordinate: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns the indices of every dimension that a rank's piece has."""
    return runs_of(piece.shape, tuple(piece.mesh.shape), coordinate, piece.placements)


@cache
def _even(piece: TPShard) -> bool:
    """Returns whether all ranks' pieces have one shape."""
    sizes = ([sum(n for _, n in runs) for runs in _runs(piece, at)] for at in _coordinates(piece.mesh))
    return all(tuple(each) == piece.local for each in sizes)


def _coordinates(mesh: DeviceMesh) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh.shape))
