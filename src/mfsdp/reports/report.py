"""Results of `mfsdp.explain` as text, tables and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cost_model.step_data import WHY, Pipeline, StepData, seconds
from ..ir.byte_costs import size
from . import chrome, page


class Report(StepData):
    """The predicted step. ``print(report)`` shows it; `html` and `trace` write files."""

    def __str__(self) -> str:
        steps = [self.matrices[1]] if self.matrices[1] else []
        listings = dict.fromkeys(self.listing(view.phase) for view in self.views)
        return "\n".join([self.summary(), "", *listings, *steps])

    def summary(self, waits: int = 8) -> str:
        """Returns the report without listings.

        Args:
            waits: maximum number of exposed waits to list.
        """
        waited = sum(x.seconds for x in self.exposed)
        lines = [
            f"{self.name} on {self.ranks} ranks {self.grid}, {self.machine.name}"
            + (f", {self.schedule}" if self.schedule else ""),
            "",
            f"step      {seconds(self.step)}   compute {seconds(self.compute)}, exposed communication "
            f"{seconds(waited)} ({waited / self.step:.0%})"
            + (f", slowed by transfers {seconds(self.slowed)}".rstrip() if self.slowed > 0.005 * self.step else ""),
            *(
                f"{v.phase:<9} {seconds(v.seconds)}" + (f"   {v.runs} times" if v.runs > 1 else "")
                for v in self.views
                if v.lines
            ),
            f"optimizer {seconds(self.optimizer)}" + (f"   {self.matrices[0]}" if self.matrices[0] else ""),
        ]
        if self.pipeline is not None:
            lines += _ranks(self.pipeline, self.bubble / self.step)
        elif len(self.stages) > 1:
            peaks = ", ".join(map(size, self.stages))
            lines.append(f"bubble    {seconds(self.bubble)}   {self.bubble / self.step:.0%}; peaks by stage: {peaks}")
        if self.tokens:
            lines.append(
                f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_second / self.ranks:,.0f} per rank; "
                f"model FLOP/s utilization {self.utilization:.1%}"
            )
        if self.cost:
            lines.append(f"{self.cost:,.3g} per million tokens, at {self.price:g} for a rank and hour")
        fits = "fits" if self.fits else "DOES NOT FIT"
        lines += ["", str(self.ledger), f"{fits} in {size(self.machine.memory)}"]
        if self.machine.cuda:
            which = {True: list[str](), False: list[str]()}
            for name, there in self.fits_on().items():
                which[there].append(name)
            lines.append(f"on as many ranks fits in {', '.join(which[True]) or 'nothing that is known'}"
                         + (f"; not in {', '.join(which[False])}" if which[False] else ""))  # fmt: skip
        lines += [self.uncounted, ""] if self.uncounted else [""]
        if self.exposed:
            lines.append("exposed communication: the longest")
            lines += [
                f"  {seconds(x.seconds)}  {x.phase:<9} {x.line:<24} {x.unit:<24} {WHY[x.why]}"
                for x in self.exposed[:waits]
            ]
            by = {
                why: sum(x.seconds for x in self.exposed if x.why == why)
                for why in dict.fromkeys(x.why for x in self.exposed)
            }
            lines.append("  all of it: " + ", ".join(f"{seconds(s).strip()} {why}" for why, s in by.items()))
        if self.plan is not None:
            lines += ["", *str(self.plan).split("\n")]
        for text in self.warnings:
            lines.append(f"warning: {text}")
        for text in self.notes:
            lines.append(f"note: {text}")
        for s in self.suggestions:
            lines.append(f"suggestion: {s.text}: step {seconds(s.step).strip()} ({s.step / self.step - 1:+.0%}), "
                         f"peak {size(s.peak)}")  # fmt: skip
        lines.append(self.error)
        return "\n".join(lines).rstrip()

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes one HTML page that needs no network. Requires the extra ``report``."""
        Path(path).write_text(page.render(self), encoding="utf-8")

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated step as a Chrome trace (ui.perfetto.dev and chrome://tracing open it)."""
        Path(path).write_text(chrome.chrome(self), encoding="utf-8")


def _ranks(pipeline: Pipeline, share: float) -> list[str]:
    """Returns the lines on a pipeline's ranks."""
    shown = pipeline.ranks[pipeline.shown]
    bubble = seconds(pipeline.seconds - shown.computing)
    lines = [f"bubble    {bubble}   {share:.0%}; this is rank {pipeline.shown} of the pipeline, which sends for "
             f"{seconds(pipeline.sending).strip()}", "",
             "rank  stages        computes   bubble  in flight  weight parts      peak"]  # fmt: skip
    for r, rank in enumerate(pipeline.ranks):
        stages = ", ".join(map(str, rank.stages))
        lines.append(f"{r:>4}  {stages:<12}{seconds(rank.computing)}   {rank.bubble:>6.1%}  {rank.in_flight:>9}  "
                     f"{rank.waiting:>12}  {size(rank.peak):>8}")  # fmt: skip
    return lines


@dataclass
class Comparison:
    """Several reports. ``print`` shows a table; `plot` draws a chart."""

    varied: list[str]
    values: list[dict[str, str]]
    reports: list[Report]

    @property
    def best(self) -> int | None:
        """Index of the fastest report that fits; ``None`` if none does."""
        fitting = [i for i, r in enumerate(self.reports) if r.fits]
        return min(fitting, key=lambda i: (self.reports[i].step, self.reports[i].peak), default=None)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __str__(self) -> str:
        costs = any(r.cost for r in self.reports)
        head = [*self.varied, "step", "exposed", "tokens/s", "MFU", "peak", *(["per million"] if costs else []), ""]
        rows = [head]
        for i, (values, r) in enumerate(zip(self.values, self.reports, strict=True)):
            note = "best that fits" if i == self.best else "" if r.fits else "does not fit"
            rows.append(
                [
                    *(values[name] for name in self.varied),
                    seconds(r.step).strip(),
                    seconds(sum(x.seconds for x in r.exposed)).strip(),
                    f"{r.tokens_per_second:,.0f}" if r.tokens else "-",
                    f"{r.utilization:.1%}",
                    size(r.peak),
                    *([f"{r.cost:,.3g}"] if costs else []),
                    note,
                ]
            )
        widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws step times with their exposed communication, and peaks. Requires the extra ``demo`` (matplotlib)."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        labels = [", ".join(f"{k} {v}" if k != "hardware" else v for k, v in values.items()) for values in self.values]
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 1.2 + 0.4 * len(labels)), layout="constrained", sharey=True, width_ratios=(2, 1)
        )
        exposed = [1e3 * sum(x.seconds for x in r.exposed) for r in self.reports]
        steps = [1e3 * r.step for r in self.reports]
        left.barh(labels, [s - e for s, e in zip(steps, exposed, strict=True)], color="C0", label="compute")
        left.barh(
            labels, exposed, left=[s - e for s, e in zip(steps, exposed, strict=True)], color="C3", label="exposed"
        )
        left.set(xlabel="ms per step")
        left.invert_yaxis()
        left.legend()
        if self.best is not None:
            left.get_yticklabels()[self.best].set_fontweight("bold")
        right.barh(
            labels, [r.peak / 2**30 for r in self.reports], color=["C0" if r.fits else "C3" for r in self.reports]
        )
        right.axvline(min(r.machine.memory for r in self.reports) / 2**30, color="0.5", linestyle="--")
        right.set(xlabel="peak GiB per rank")
        figure.savefig(path, dpi=120)
        plt.close(figure)
