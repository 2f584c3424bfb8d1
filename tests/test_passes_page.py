"""Passes of one's own: docs/write_a_pass.md does what it says, and a table that cannot be is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import mfsdp
from mfsdp.pipeline import PIPELINE, PassError
from tests.helpers.toys import FIRST_STAGES, toy2

PAGE = Path(__file__).parent.parent / "docs" / "write_a_pass.md"


@pytest.mark.slow
def test_the_page_runs_as_it_stands(capsys):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code) == 5
    exec(compile("\n".join(code), str(PAGE), "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    assert "after too_early: " in said
    times = [tuple(map(int, t)) for t in re.findall(r"ranks: (\d+) us a step, (\d+) us with it", said)]
    changes = [round(100 * (after / before - 1)) for before, after in times]
    assert changes == [-2, 3], "what the page says of it"


def nothing(p: mfsdp.ir.program.Program) -> None:
    p.note("nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": nothing}, r"option passes=<function.*give a table of passes, \(\*mfsdp.pipeline.PIPELINE"),
        ({"passes": ()}, "give a table of passes"),
        ({"passes": (("a", 3),)}, "give a table of passes"),
        ({"passes": (*PIPELINE, ("gather", nothing))}, "'gather' is there twice"),
        ({"passes": (("capture", nothing),)}, "'capture' is there twice"),
        ({"passes": (PIPELINE[4], PIPELINE[3])}, "'gather' has to come before 'reshard': there is nothing to free"),
        ({"passes": PIPELINE[:5], "prefetch": 2}, "option prefetch=2 is for the pass 'prefetch', which is not in"),
        ({"passes": PIPELINE[:8], "pool": False}, "option pool=False is for the pass 'plan_memory'"),
        ({"passes": (*PIPELINE[:6], ("defer", nothing)), "reduce_lag": 0}, "option reduce_lag=0 is for the pass"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        torch.compile(mfsdp.fully_shard(nn.Linear(4, 4)), backend="mfsdp", options=options)(torch.ones(1, 4))
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=message):
        mfsdp.explain(nn.Linear(4, 4), (torch.ones(1, 4),), options=options)


def test_rows_of_the_pipeline_obey_the_options():
    table = (*PIPELINE, ("mine", nothing))
    report = mfsdp.explain(nn.Linear(4, 4), (torch.ones(1, 4),), options={"passes": table, "prefetch": 2})
    assert "depth 2" in report.listing("forward", "prefetch") and "nothing" in report.listing("forward", "mine")
    two = mfsdp.compare(nn.Linear(4, 4), (torch.ones(1, 4),), options={"passes": [PIPELINE, table]})
    assert "mine" in str(two)


def test_an_exception_names_the_pass_and_the_program(tmp_path):
    def broken(p: mfsdp.ir.program.Program) -> None:
        raise KeyError("oh")

    with pytest.raises(PassError, match="the pass 'broken' raised on toy2 forward: KeyError: 'oh'") as caught:
        mfsdp.pipeline.run(toy2(), passes=(*PIPELINE, ("broken", broken)))
    assert isinstance(caught.value.__cause__, KeyError)
    run = torch.compile(
        mfsdp.fully_shard(nn.Linear(4, 4)), backend="mfsdp",
        options={"lowering": "eager", "dump": str(tmp_path), "passes": (*PIPELINE, ("broken", broken))},
    )  # fmt: skip
    with pytest.raises(Exception, match="the pass 'broken' raised on Linear"):
        run(torch.ones(1, 4))


@pytest.mark.slow
def test_a_table_is_in_the_dump(tmp_path):
    options = {"lowering": "eager", "dump": str(tmp_path), "passes": (*PIPELINE, ("mine", nothing))}
    run = torch.compile(mfsdp.fully_shard(nn.Linear(4, 4)), backend="mfsdp", options=options)
    run(torch.ones(1, 4)).sum().backward()
    assert [p.name for p in tmp_path.glob("*.forward.*.mine.txt")] and list(tmp_path.glob("*.report.html"))


def test_stages_by_name():
    stages = mfsdp.pipeline.run(toy2())
    assert stages["plan_memory"] is stages[-2]
    with pytest.raises(KeyError, match=f"no pass 'polo' has run; there are {FIRST_STAGES}"):
        stages["polo"]
