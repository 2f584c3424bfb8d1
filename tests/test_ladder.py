"""Imports point down, private torch stays in one place, and the pieces know as little as they claim."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mfsdp import pipeline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "mfsdp"

LADDER = [
    {"__main__"},
    {"__init__"},
    {"explain"},
    {"report"},
    {"tracing", "backend", "convert"},
    {"dump", "profile"},
    {"page"},
    {"estimate"},
    {"facts"},
    {"shard"},
    {"pipeline", "lowering", "materialize", "fallback", "optimizer", "norms", "huggingface", "checkpoint", "simulate"},
    {"admission", "alike", "fsdp2", "undo", "capture", "ledger", "writes"},
    {"state", "statedicts", "measure"},
    {"placement"},
    {"mesh"},
    {"dtensor"},
    {"outside"},
    {"passes", "check", "listing", "runtime"},
    {"clock"},
    {"kernels"},
    {"cost"},
    {"program"},
    {"ops", "roles"},
    {"units"},
    {"agreement", "clients", "config", "files", "hardware", "layout", "names", "rows"},
]
"""Highest first. A file imports only from lower rows."""

ROW = {name: i for i, row in enumerate(LADDER) for name in row}


def files() -> dict[str, list[Path]]:
    """Modules by name; the passes count as one row (`Path.rglob` does not follow the link before Python 3.13)."""
    found = {p.stem: [p] for p in SOURCE.glob("*.py")}
    found["passes"] = sorted((ROOT / "passes").glob("*.py"))
    return found


def imported(path: Path, name: str) -> set[str]:
    """Modules of ours that a file imports, wherever in it."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1 and name != "passes":
                out |= {module.split(".")[0]} if module else {a.name for a in node.names}
            elif node.level == 1:
                assert path.name == "__init__.py", f"{path.name}: passes do not know each other"
            elif module == "mfsdp":
                out |= {a.name for a in node.names}
            elif module.startswith("mfsdp."):
                out.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            out |= {a.name.split(".")[1] for a in node.names if a.name.startswith("mfsdp.")}
    return {m for m in out if m in ROW}


def test_every_file_has_a_row():
    assert set(files()) == set(ROW)
    assert len(files()["passes"]) >= 4, "the passes were not found: this test would pass without looking"
    assert (SOURCE / "passes").is_symlink() and (SOURCE / "passes").resolve() == ROOT / "passes"


@pytest.mark.parametrize("name", ROW)
def test_imports_point_down(name):
    for path in files()[name]:
        for other in imported(path, name):
            assert ROW[other] > ROW[name], f"{path.name} imports {other}, which stands no lower"


def test_the_layout_needs_no_torch():
    text = (SOURCE / "layout.py").read_text()
    assert "torch" not in {n.split(".")[0] for n in _all_imports(text)}


def test_only_one_file_touches_process_groups():
    for name, paths in files().items():
        for path in paths:
            used = {n for n in _all_imports(path.read_text()) if n.startswith("torch.distributed")}
            groups = {n for n in used if n in ("torch.distributed", "torch.distributed.distributed_c10d")}
            assert not groups or name == "runtime", f"{path.name} imports {groups}"


def _all_imports(text: str) -> set[str]:
    out = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            out.add(node.module or "")
    return out


def test_the_passes_refuse_to_load_twice():
    code = "import passes"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "import the passes as mfsdp.passes" in out.stderr


def test_order_constraints_name_passes_and_hold():
    names = [name for name, _ in pipeline.PIPELINE]
    for early, late, why in pipeline.ORDER:
        assert names.index(early) < names.index(late) and len(why) > 10
    assert {n for pair in pipeline.ORDER for n in pair[:2]} == set(names)


def test_private_torch_is_marked():
    """Whoever uses a private name of torch says so, and with which versions it was tried."""
    for paths in files().values():
        for path in paths:
            text = path.read_text()
            private = {n for n in _all_imports(text) if n.startswith("torch.") and "._" in n}
            if private:
                assert "2.11 to 2.13" in text, f"{path.name} uses {private} and names no versions"
