"""``python -m tests.fuzz --minutes 10`` (or ``make fuzz MINUTES=10``); docs/internals/fuzz.md says what it does."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.fuzz.cases import Case, draw, features, minimised
from tests.fuzz.program import program
from tests.fuzz.trial import SECONDS, Court, Verdict


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.fuzz")
    parser.add_argument("--seed0", type=int, default=None, help="the first seed (default: a random one)")
    parser.add_argument("--count", type=int, default=None, help="stop after so many models")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so many minutes (default: 10)")
    parser.add_argument("--only", type=int, default=None, metavar="SEED", help="this seed alone")
    parser.add_argument("--case", type=Path, default=None, help="this case alone: a file with its data (JSON)")
    parser.add_argument(
        "--feature", default="", help="only seeds whose cases have this feature, as penalty or strategy:0"
    )
    parser.add_argument("--no-minimise", action="store_true", help="print failing cases as they are")
    parser.add_argument("--show", action="store_true", help="print programs, run nothing")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="of cases that are not for one rank")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which a rank counts as hanging")
    parser.add_argument("--log", type=Path, default=None, help="append a JSON line per model and a summary")
    return parser.parse_args()


def cases(args: argparse.Namespace) -> Iterator[Case]:
    if args.case is not None:
        yield json.loads(args.case.read_text())
        return
    first = args.only if args.only is not None else args.seed0
    if first is None:
        first = random.SystemRandom().randrange(10**6) * 1000
    count = 1 if args.only is not None else args.count if args.count is not None else sys.maxsize
    minutes = args.minutes if args.minutes is not None else 10 if args.count is None else float("inf")
    seed, begun = first, time.monotonic()
    while count > 0 and time.monotonic() - begun < 60 * minutes:
        case = draw(seed, args.ranks)
        seed += 1
        if args.feature and not any(f == args.feature or f.split(":")[0] == args.feature for f in features(case)):
            continue
        count -= 1
        yield case


class Record:
    """What was tried and what came of it."""

    def __init__(self, path: Path | None):
        self._file = path.open("a") if path is not None else None
        self._begun = time.monotonic()
        self.cpu = 0.0
        self.outcomes: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.failed: list[int] = []
        self.refusals: Counter[str] = Counter()
        self.seeds: list[int] = []

    def add(self, case: Case, verdict: Verdict, smallest: Case | None = None) -> None:
        self.outcomes[verdict.outcome] += 1
        self.features.update(features(case))
        self.seeds.append(case["seed"])
        self.cpu += verdict.cpu
        if verdict.outcome == "refused":
            self.refusals[" ".join(verdict.text.split())[:100]] += 1
        if verdict.outcome == "failed":
            self.failed.append(case["seed"])
        line = {"seed": case["seed"], "outcome": verdict.outcome, "cpu": round(verdict.cpu, 2)}
        if verdict.outcome != "right":
            line |= {"kind": verdict.kind, "text": verdict.text[:500]}
        if smallest is not None:
            line["case"] = smallest
        self._write(line)

    def summary(self) -> dict[str, object]:
        minutes = (time.monotonic() - self._begun) / 60
        done = sum(self.outcomes.values())
        out = {
            "seeds": [min(self.seeds, default=None), max(self.seeds, default=None)], "models": done,
            "minutes": round(minutes, 1), "models_per_minute": round(done / max(minutes, 1e-9)),
            "cpu_seconds_per_model": round(self.cpu / max(done, 1), 2),
            **{name: self.outcomes[name] for name in ("right", "refused", "upstream", "failed")},
            "failed_seeds": self.failed, "torch": torch.__version__, "features": dict(sorted(self.features.items())),
            "refusals": dict(self.refusals.most_common()),
        }  # fmt: skip
        self._write({"summary": out})
        return out

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def smallest(court: Court, case: Case, verdict: Verdict) -> tuple[Case, Verdict]:
    """The case made small, as long as it fails in the same way; and how that one fails."""
    last = verdict

    def fails(candidate: Case) -> bool:
        nonlocal last
        found = court.try_(candidate)
        if found.outcome == "failed" and found.kind == verdict.kind:
            last = found
            return True
        return False

    return minimised(case, fails), last


def main() -> int:
    args = arguments()
    warnings.simplefilter("ignore")
    record = Record(args.log)
    with Court(args.seconds) as court:
        for case in cases(args):
            if args.show:
                print(program(case))
                continue
            verdict = court.try_(case)
            small, how = case, verdict
            if verdict.outcome == "failed":
                if not args.no_minimise:
                    small, how = smallest(court, case, verdict)
                print(
                    f"\n# seed {case['seed']} failed: {verdict.kind}; {json.dumps(small)}\n{program(small, how.text)}"
                )
                print("# " + "\n# ".join(how.trace.splitlines()[-12:]), flush=True)
            record.add(case, verdict, small if verdict.outcome == "failed" else None)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{sum(record.outcomes.values())} models, {dict(record.outcomes)}  ")
    if not args.show:
        print(json.dumps(record.summary(), indent=1))
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main())
