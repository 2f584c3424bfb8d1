"""Errors of one rank that all ranks raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed.checkpoint as dcp

from ..runtime import groups

T = TypeVar("T")
R = TypeVar("R")


class quiet(warnings.catch_warnings):
    """Suppresses torch's warning that torch.distributed is disabled: one process is intended."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged. Raised on every rank; earlier checkpoints are unchanged."""


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Raises an OSError, and an OSError or RuntimeError that torch.distributed.checkpoint has wrapped, as
    `CheckpointError`; other errors that it has wrapped as they are. For one process; else `together`.
    """
    try:
        yield
    except (OSError, dcp.CheckpointException) as error:
        refused = inner(error)
        if not isinstance(refused, (OSError, RuntimeError)):
            raise refused from error
        raise CheckpointError(f"mfsdp: could not {what}: {cause_of(error)}") from error


def together(what: str, function: Callable[[], T]) -> list[T]:
    """Runs ``function`` on every rank and returns all results, by rank.

    Raises:
        CheckpointError: on every rank, if any has failed.
    """
    failure, result = _tried(function, groups.rank())
    answers: list[tuple[str, Any]] = groups.all_objects((failure, result))
    for failed, _ in answers:
        if failed:
            raise CheckpointError(f"mfsdp: could not {what}: {failed}")
    return [answer for _, answer in answers]


def first_completes(
    what: str,
    channel: groups.Everybody,
    each: Callable[[], T],
    complete: Callable[[list[T]], R],
    clean_up: Callable[[], object],
) -> R:
    """Runs ``each`` on every rank, then ``complete`` on the first with all results; returns its result on every rank.

    Args:
        what: the action, for the error.
        channel: communicates between ranks.
        clean_up: runs on the first rank if any has failed, before the others are told.

    Raises:
        CheckpointError: on every rank, if any has failed.
    """
    answers = channel.to_first(_tried(each, channel.rank))
    failure, result = next((failed for failed, _ in answers if failed), ""), None
    if channel.rank == 0 and not failure:
        failure, result = _tried(lambda: complete([answer for _, answer in answers if answer is not None]), 0)
    if channel.rank == 0 and failure:
        clean_up()
    failure, result = channel.from_first((failure, result))
    if failure:
        raise CheckpointError(f"mfsdp: could not {what}: {failure}")
    return cast(R, result)


def _tried(function: Callable[[], T], rank: int) -> tuple[str, T | None]:
    """Returns an error message, or ``""`` and the result."""
    try:
        return "", function()
    except dcp.CheckpointException as error:  # already of all ranks; not an Exception
        return in_words(error), None
    except Exception as error:
        return f"rank {rank}: {cause_of(error)}", None


def in_words(error: dcp.CheckpointException) -> str:
    """Returns the message of an error that torch.distributed.checkpoint collected from ranks; raises Ctrl-C."""
    if not isinstance(inner(error), Exception):
        raise inner(error) from error
    return f"rank {next(iter(error.failures))}: {cause_of(error)}"


def inner(error: BaseException) -> BaseException:
    """Returns the error that torch.distributed.checkpoint has wrapped."""
    return next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error


def cause_of(error: BaseException) -> str:
    """Returns an error's message; for a full disk the OSError's, even if torch's writers have wrapped it."""
    error = inner(error)
    chain, link = [error], error.__context__
    while link is not None:
        chain.append(link)
        link = link.__context__
    shown = next((e for e in chain if isinstance(e, OSError)), error)
    return f"{type(shown).__name__}: {shown}"
