"""Imports point down, private torch stays in one place, and the pieces know as little as they claim."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mfsdp import pipeline

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "mfsdp"

ROOMS = [
    "__main__",
    "launch",
    "cli",
    "integrations",
    "__init__",
    "registration",
    "planning",
    "compiler",
    "sharding",
    "checkpoints",
    "reports",
    "cost_model",
    "optim",
    "buffers",
    "dtensor",
    "runtime",
    "pipeline",
    "passes",
    "ir",
    "config",
]
"""Highest first: folders of src/mfsdp, and the files beside them. A file imports from lower ones and from its own."""

RANK = {room: i for i, room in enumerate(ROOMS)}


def files(room: str) -> list[Path]:
    """What is in a room (`Path.rglob` does not follow the link to the passes before Python 3.13)."""
    if room == "passes":
        return sorted((ROOT / "passes").glob("*.py"))
    return [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))


def name_of(path: Path, room: str) -> str:
    """The file's dotted name in its room."""
    if room == "passes" or path.parent == SOURCE:
        return path.stem
    return ".".join(path.relative_to(SOURCE / room).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, room: str, types_too: bool = True) -> set[tuple[str, str]]:
    """Which of our files a file imports, wherever in it: their rooms and names."""
    out = set()
    package = (room,) if room == "passes" else path.relative_to(SOURCE).parts[:-1]
    tree = ast.parse(path.read_text())
    if not types_too:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "mfsdp"):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            parts = (*above, *(node.module or "").removeprefix("mfsdp").strip(".").split(".")) if node.module else above
            for name in node.names:
                out.add(_known([p for p in (*parts, name.name) if p]))
        elif isinstance(node, ast.Import):
            out |= {_known(a.name.split(".")[1:]) for a in node.names if a.name.startswith("mfsdp.")}
    return {(r, name) for r, name in out if r in RANK}


def _known(parts: list[str]) -> tuple[str, str]:
    """The room of a dotted name, and the file in it: the longest part of the name that is one."""
    for end in range(len(parts), 1, -1):
        where = SOURCE.joinpath(*parts[:end])
        if where.with_suffix(".py").exists() or (where / "__init__.py").exists():
            return parts[0], ".".join(parts[1:end])
    return parts[0], parts[1] if len(parts) > 1 else ""


def everything() -> list[tuple[str, Path]]:
    return [(room, path) for room in ROOMS for path in files(room)]


def test_every_file_is_in_a_room():
    there = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"} | {
        p.stem for p in SOURCE.glob("*.py")
    }
    assert there == set(ROOMS)
    assert len(files("passes")) >= 4, "the passes were not found: this test would pass without looking"
    assert (SOURCE / "passes").is_symlink() and (SOURCE / "passes").resolve() == ROOT / "passes"


def test_no_room_hides_a_public_name():
    import mfsdp

    public = set(mfsdp.__all__)
    assert not (public - {"passes", "pipeline"}) & set(ROOMS)
    assert public == set(mfsdp._WHERE) and public <= set(dir(mfsdp)) and all(hasattr(mfsdp, name) for name in public)
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    typed = {a.name: n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level for a in n.names}
    assert {name: module or name for name, module in typed.items()} == mfsdp._WHERE, "what type checkers are told"


def test_the_command_line_needs_no_torch():
    code = "import sys; from mfsdp.cli import main; main.main(['--help'])"
    out = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, timeout=60)
    assert "explain" in out.stdout and "torch" not in out.stderr, out.stderr[-2000:]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room):
    for path in files(room):
        for other, name in imported(path, room):
            if room == "passes" and other == room:
                assert path.name == "__init__.py", f"{path.name}: passes do not know each other"
            assert RANK[other] >= RANK[room], f"{room}/{path.name} imports {other}/{name}, which stands higher"


def test_no_pass_is_tried_before_one_that_it_needs():
    first = {name for name, _ in pipeline.phases(pipeline.table(interleave=True)).first}
    wrong = [f"{early} before {late}" for early, late, _ in pipeline.ORDER if late in first and early not in first]
    assert not wrong, f"pipeline.phases runs these in the wrong order: {wrong}; add the later pass to its names"


@pytest.mark.parametrize("room", ROOMS)
def test_no_circles_in_a_room(room):
    knows = {name_of(p, room): {name for other, name in imported(p, room, False) if other == room} for p in files(room)}
    while knows:
        free = {name for name, others in knows.items() if not others & knows.keys() - {name}}
        assert free, f"{room}: these import each other: {sorted(knows)}"
        knows = {name: others for name, others in knows.items() if name not in free}


def test_the_page_names_every_file():
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    rows = {line.split("`")[1].strip("/"): line for line in page.splitlines() if line.startswith("| `")}
    for room, path in everything():
        if (SOURCE / room).is_dir() and path.stem != "__init__":
            assert f"`{path.stem}`" in rows[room], f"{room}/{path.name} is not in architecture.md"
    for named in re.findall(r"`(\w+/\w+\.py)`", page):
        assert (SOURCE / named).exists() or (ROOT / named).exists(), f"architecture.md: there is no {named}"


@pytest.mark.parametrize("room", [r for r in ROOMS if (SOURCE / r).is_dir()])
def test_rooms_say_what_they_are(room):
    text = (ROOT / "passes" / "__init__.py" if room == "passes" else SOURCE / room / "__init__.py").read_text()
    assert len(ast.get_docstring(ast.parse(text)) or "") > 10


def test_the_layout_needs_no_torch():
    text = (SOURCE / "config" / "layout.py").read_text()
    assert "torch" not in {n.split(".")[0] for n in _all_imports(text)}


def test_only_one_room_touches_process_groups():
    for room, path in everything():
        used = {n for n in _all_imports(path.read_text()) if n.startswith("torch.distributed")}
        groups = {n for n in used if n in ("torch.distributed", "torch.distributed.distributed_c10d")}
        assert not groups or room == "runtime", f"{path.name} imports {groups}"


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
    names = [name for name, _ in pipeline.table(interleave=True)]
    for early, late, why in pipeline.ORDER:
        assert names.index(early) < names.index(late) and len(why) > 10
    assert {n for pair in pipeline.ORDER for n in pair[:2]} == set(names)


def test_test_modules_do_not_import_each_other():
    """What tests share is in tests/helpers. `test_nccl` alone runs the functions of other modules, on GPUs."""
    for path in (ROOT / "tests").glob("test_*.py"):
        found = re.findall(r"^\s*(?:from tests import (.*)|from tests\.(test_\w+))", path.read_text(), re.MULTILINE)
        assert path.stem in ("test_nccl", "test_saving") or not found, f"{path.name} imports {found}"


def test_nothing_of_others_is_patched_elsewhere():
    """`config.patches.wrap` alone replaces functions of others (integrations patch their framework)."""
    found = set()
    for room, path in everything():
        if room == "integrations":
            continue
        tree, foreign = ast.parse(path.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                foreign |= {(a.asname or a.name).split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("mfsdp"):
                foreign |= {a.asname or a.name for a in node.names}
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                text = ast.unparse(target)
                if isinstance(target, ast.Attribute) and "(" not in text and text.split(".")[0] in foreign:
                    found.add((path.name, text))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                owner = ast.unparse(node.args[0]).split(".")[0]
                found |= {(path.name, owner)} if owner in foreign else set()
    expected = {("launch.py", "sys.argv"), ("tracing.py", "fake_tensor_tls.allow_non_fake_inputs_override")}
    assert found == expected | {("symbolic_numbers.py", "math")}


def test_private_torch_is_marked():
    """Whoever uses a private name of torch says so, and with which versions it was tried."""
    for _, path in everything():
        text = path.read_text()
        private = {n for n in _all_imports(text) if n.startswith("torch.") and "._" in n}
        if private:
            assert "2.11 to 2.15" in text, f"{path.name} uses {private} and names no versions"
        inside = {n for n in private if n.startswith("torch._functorch")}
        assert not inside, f"{path.name} imports {inside}: functorch.compile has the partitioner and the settings"


@pytest.mark.slow
def test_who_imports_mfsdp_may_load_what_it_has_saved():
    """Beside torch the import alone makes its tensors known to ``torch.load``."""
    code = "import torch, mfsdp; print([f.__name__ for f in torch.serialization.get_safe_globals()])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "_rebuilt" in out.stdout, out.stderr[-2000:]
