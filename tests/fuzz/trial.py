"""Runs programs on ranks, and says whether what came out is right, refused in words, or a failure."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fuzz.cases import APART, Case, control, features
from tests.fuzz.program import program
from tests.fuzz.words import LOST, explained
from tests.helpers.ranks import Ranks

SECONDS = 90.0
"""For one case, compilation included, on a busy machine."""
PATIENCE = 20.0
"""For the other ranks, once one of them has raised."""


LINGERS = 1.0
"""Seconds until a process ends that is done: others read what it has sent."""


def attempt(path: str, ends: bool) -> tuple[str, str, str, float]:
    """On a rank: runs a program. Gives ``("right" or "wrong", what, "")`` or the exception's type, text, traceback; and
    the seconds of processor time that it took. With ``ends`` its process ends then, as a script's would.
    """
    begun = time.process_time()
    said, error = _attempt(path)
    answer = (*said, time.process_time() - begun)
    if not ends:
        return answer
    if error is None:
        time.sleep(LINGERS)
    else:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, error.__traceback__)
    raise SystemExit(answer)


def _attempt(path: str) -> tuple[tuple[str, str, str], BaseException | None]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        faults = module.main()
        return (("wrong", "\n".join(faults), "") if faults else ("right", "", "")), None
    except BaseException as error:
        return (type(error).__name__, str(error), traceback.format_exc()), error
    finally:
        del sys.modules[spec.name]


@dataclass(frozen=True)
class Verdict:
    """What a case came to."""

    outcome: str
    """``"right"``, ``"refused"``, ``"upstream"`` (fails unsharded too) or ``"failed"``."""
    kind: str = ""
    """How it failed, in a word or two: what stays the same while a case is made smaller."""
    text: str = ""
    trace: str = ""
    cpu: float = 0.0
    """Seconds of processor time of the busiest rank."""


class Court:
    """Ranks to try cases on, by how many a case needs, and the folder of their programs."""

    def __init__(self, seconds: float = SECONDS, renew: int = 100) -> None:
        self._ranks: dict[int, Ranks] = {}
        self._used: Counter[int] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="mfsdp-fuzz-")
        self._seconds, self._renew, self._count = seconds, renew, 0

    def try_(self, case: Case) -> Verdict:
        """One case, on ranks that no failure went before; one that fails is tried without us too."""
        verdict = self._one(case)
        if verdict.outcome != "failed" or verdict.kind == "no answer":
            return verdict
        alone = self._one(control(case))
        same = alone.outcome == "failed" and alone.kind == verdict.kind
        return replace(verdict, outcome="upstream") if same else verdict

    def _one(self, case: Case) -> Verdict:
        world = case["world"]
        self._count += 1
        path = Path(self._folder.name, f"seed{case['seed']}_{self._count}.py")
        path.write_text(program(case))
        if world not in self._ranks:
            self._ranks[world] = Ranks(world, "gloo" if world > 1 else "", "forkserver")
        ranks, ends = self._ranks[world], _apart(features(case))
        answers = ranks.answers(attempt, str(path), ends, timeout=self._seconds, patience=PATIENCE, bad=_bad)
        verdict = judged(features(case), [a[1] if a else None for a in answers])
        self._used[world] += 1
        if ends or any(a is None or _bad(a) for a in answers) or self._used[world] % self._renew == 0:
            ranks.stop()
        return verdict

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.stop()
        self._folder.cleanup()

    def __enter__(self) -> Court:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _apart(has: list[str]) -> bool:
    """Whether a case has a fault that takes one rank out of step."""
    return any(f"fault:{what}" in has for what in APART)


def _bad(answer: tuple[bool, Any]) -> bool:
    return not answer[0] or answer[1][0] not in ("right", "wrong")


def judged(has: list[str], answers: list[Any]) -> Verdict:
    """The verdict on what the ranks of a case have said.

    Args:
        has: the case's features.
        answers: by rank, as :func:`attempt` gives them; ``None`` from a rank that did not answer, a text from one whose
            process died.
    """
    cpu = max((a[3] for a in answers if isinstance(a, tuple)), default=0.0)
    said = [a[:3] if isinstance(a, tuple) else ("died", a, "") if a else ("no answer", "", "") for a in answers]
    kinds = [s[0] for s in said]
    text = "\n".join(f"rank {r}: {kind}{': ' if what else ''}{_short(what)}" for r, (kind, what, _) in enumerate(said))
    trace = next((t for _, _, t in said if t), "")
    if all(k == "right" for k in kinds):
        return Verdict("right", cpu=cpu)
    raised = [s for s in said if s[0] not in ("right", "wrong", "no answer", "died")]
    done = kinds.count("right") if _apart(has) else 0  # before the others missed anything
    if len(raised) + done == len(said) and _refused(has, raised):
        return Verdict("refused", raised[0][0], raised[0][1], cpu=cpu)
    worst = "wrong" if "wrong" in kinds else raised[0][0] if raised else next(k for k in kinds if k != "right")
    missing = " and no answer" if raised and "no answer" in kinds else ""
    if len(raised) == len(said) and any(explained(has, k, t) for k, t, _ in raised):
        missing = " beside a refusal"
    return Verdict("failed", worst + missing, text, trace, cpu)


def _refused(has: list[str], raised: list[tuple[str, str, str]]) -> bool:
    """Whether all ranks refuse in words; where they differ, or one of them ends, another may only see the connection
    close.
    """
    words = [explained(has, kind, text) for kind, text, _ in raised]
    apart = _apart(has) or bool({"differs", "experts"} & set(has))
    lost = [apart and bool(re.search(LOST, text)) for _, text, _ in raised]
    return any(words) and all(w or x for w, x in zip(words, lost, strict=True))


def _short(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(line[:300] for line in lines[:6])
