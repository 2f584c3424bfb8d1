"""The curve, short: contenders train beside each other, and a difference would be seen."""

from __future__ import annotations

import json

import pytest

from tests.helpers.scripts import printed

SIZE = ("--layers", "1", "--width", "32", "--length", "16", "--batch", "2", "--lr", "0.05")


@pytest.mark.dist
@pytest.mark.slow
def test_contenders_have_the_bits_of_the_unsharded_model(ranks, tmp_path):
    chosen = "FSDP2;mfsdp, strategy 3, bf16;mfsdp, strategy 3, Muon"
    arguments = ("--out", str(tmp_path), *SIZE, "--steps", "6", "--only", chosen)
    told, _ = ranks.run(printed, "examples.curve.curve.worker", *arguments)
    assert "mfsdp, strategy 3, bf16: loss" in told
    again = printed("examples.curve.curve.launch", *arguments)
    assert "loss" in again and ": loss" not in again, "what has been run is not run again"
    rows = {r["name"]: r for r in json.loads((tmp_path / "results.json").read_text())["rows"]}
    muon = ["unsharded, Muon", "mfsdp, strategy 3, Muon"]
    assert list(rows) == ["unsharded", "FSDP2", *muon, "unsharded, bf16", "FSDP2, bf16", "mfsdp, strategy 3, bf16"]
    for name, row in rows.items():
        if row["against"] is not None:
            assert row["loss"] == 0 and row["weights"] == 0 and row["step"] is None, name
        assert len(row["losses"]) == 6 and row["last"] < row["first"]
    assert rows[muon[0]]["last"] != rows["unsharded"]["last"]
    assert rows["unsharded, bf16"]["first"] != rows["unsharded"]["first"]
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert "| never |" in (tmp_path / "table.md").read_text()


def test_a_difference_is_a_row_of_the_table():
    import torch

    from examples.curve.curve import UNSHARDED, Row, _compare, contenders, table

    one = {"losses": [2.0, 1.0, 0.5], "weights": {"w": torch.ones(4)}}
    other = {"losses": [2.0, 1.25, 0.5], "weights": {"w": torch.tensor([1.0, 1.0, 1.0, 1.5])}}
    row = Row("FSDP2", 1.0, 2.0, 0.5, other["losses"])
    _compare(row, other, UNSHARDED, one)
    assert (row.loss, row.step, row.weights, row.relative) == (0.25, 1, 0.5, 0.25)
    assert "| FSDP2 | 2.0000, 0.5000 | 0.25 | 1 | 0.5 | 0.25 | 1.0 |" in table([row])
    names = list(contenders())
    assert all(c.against is None or names.index(c.against) < names.index(n) for n, c in contenders().items())
