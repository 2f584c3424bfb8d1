"""What is published: a wheel that runs away from the checkout, a source distribution that tests itself."""

from __future__ import annotations

import email
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mfsdp

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

STEP = """
import torch
from torch import nn
import mfsdp
assert mfsdp.__file__.startswith({home!r}), mfsdp.__file__
assert mfsdp.passes.__file__.startswith({home!r}), mfsdp.passes.__file__
model = mfsdp.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), units=[nn.Linear])
run = torch.compile(model, backend="mfsdp", options={{"lowering": "eager"}})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = run(torch.ones(2, 4)).square().sum()
before.backward()
optimizer.step()
with torch.no_grad():
    assert run(torch.ones(2, 4)).square().sum() < before
"""


def built(what: str, source: Path, into: Path) -> Path:
    """A wheel or a source distribution, made without network and without an environment of its own."""
    into.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The checkout without what git ignores: building leaves things behind."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("setuptools 77 or newer builds mfsdp")
    home = tmp_path_factory.mktemp("package")
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, home / "checkout", symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
    return home


@pytest.fixture(scope="module")
def unpacked(sources):
    """The source distribution, unpacked."""
    archive = built("sdist", sources / "checkout", sources / "dist")
    with tarfile.open(archive) as tar:
        tar.extractall(sources / "unpacked", filter="data")
    (home,) = (sources / "unpacked").iterdir()
    return home


@pytest.fixture(scope="module")
def wheel(sources, unpacked):
    """As pip makes it: from the source distribution."""
    return built("wheel", unpacked, sources / "dist")


def everything(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout(sources, unpacked):
    there, here = everything(unpacked), everything(sources / "checkout")
    made = {p for p in there if p in ("PKG-INFO", "setup.cfg") or ".egg-info/" in p}
    assert made < set(there)
    lost = {p for p in here.keys() - there.keys() if ".egg-info/" not in p}
    assert not lost, "MANIFEST.in leaves them out"
    assert all(there[p] == here[p] for p in there.keys() - made)
    link = unpacked / "src" / "mfsdp" / "passes"
    assert link.is_symlink() and link.resolve() == (unpacked / "passes").resolve()


@pytest.mark.slow
def test_tests_of_the_source_distribution_are_found_and_run(unpacked):
    """Those that walk the tree and look behind the link. All files are there by the test above."""
    command = [sys.executable, "-m", "pytest", "tests/test_ladder.py", "-k", "room"]
    path = {"PYTHONPATH": f"{unpacked / 'src'}:{unpacked}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=unpacked, env={**environment(), **path}, capture_output=True, text=True,
                          timeout=300)  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-2000:]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        links = [i.filename for i in z.infolist() if stat.S_ISLNK(i.external_attr >> 16)]
        inside = {n: z.read(n) for n in names if n.startswith("mfsdp/")}
    assert not links
    files = [p for p in (ROOT / "src" / "mfsdp").rglob("*") if p.is_file() and "passes" not in p.parts]
    named = {str(p.relative_to(ROOT / "src")): p for p in files}
    named |= {f"mfsdp/passes/{p.name}": p for p in (ROOT / "passes").glob("*.py")}
    named = {n: p for n, p in named.items() if "__pycache__" not in n}
    assert inside == {n: p.read_bytes() for n, p in named.items()}
    assert {n.split("/")[0] for n in names} == {"mfsdp", f"mfsdp-{mfsdp.__version__}.dist-info"}


FINDS = {
    "before torch": "import mfsdp; from importlib.metadata import version; assert version('mfsdp'); import torch",
    "after Dynamo has looked": "import torch; assert 'mfsdp' not in torch._dynamo.list_backends(); import mfsdp",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["before torch", pytest.param("after Dynamo has looked", marks=pytest.mark.exhaustive)]
)
def test_sources_on_a_path_are_found_by_name(tmp_path, order):
    """All packages of this environment but mfsdp, whose sources are on the path, as nobody has installed them."""
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "mfsdp" not in entry.name.replace("megatron_fsdp", ""):
            (tmp_path / entry.name).symlink_to(entry)
    code = f"{FINDS[order]}; assert torch.compile(torch.nn.Linear(2, 2), backend='mfsdp', options={{'lowering': 'eager'}})(torch.ones(2, 2)).sum()"  # noqa: E501
    (tmp_path / "mfsdp").symlink_to(ROOT / "src" / "mfsdp")  # without the entry point beside it
    path = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-S", "-P", "-c", code], cwd=tmp_path, env={**environment(), **path},
                          capture_output=True, text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_wheel_trains_outside_of_the_checkout(wheel, tmp_path):
    home = tmp_path / "site"
    with zipfile.ZipFile(wheel) as z:
        z.extractall(home)
    # -P: without the folder it runs in; the folder of the wheel is before all others.
    command = [sys.executable, "-P", "-c", STEP.format(home=str(home))]
    done = subprocess.run(command, cwd=tmp_path, env={**environment(), "PYTHONPATH": str(home)}, capture_output=True,
                          text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_long_description_stands_by_itself(wheel):
    with zipfile.ZipFile(wheel) as z:
        about = email.message_from_bytes(z.read(f"mfsdp-{mfsdp.__version__}.dist-info/METADATA"))
    text = about.get_payload()
    assert isinstance(text, str) and about["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert all(t.startswith("https://") for t in targets), targets
    assert text.count("```") == (ROOT / "README.md").read_text().count("```") > 4


def test_what_the_project_says_of_itself():
    assert PROJECT["version"] == mfsdp.__version__
    extras = PROJECT["optional-dependencies"]
    for name, needed in extras.items():
        for own in re.findall(r"mfsdp\[([^]]*)\]", " ".join(needed)):
            assert set(own.split(",")) <= extras.keys() - {name}, f"{name} needs mfsdp[{own}]"
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    wanted = {re.split(r"[\[><=]", n)[0].lower() for name in ("demo", "hf", "report", "test") for n in extras[name]}
    assert wanted - {"mfsdp"} <= pinned, "constraints.txt does not say which version"
    assert f"## {mfsdp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_relative_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    faults = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            if target.startswith(("http:", "https:")):
                continue
            there = page.parent / target if target else page
            if not there.exists():
                faults.append(f"{page.name}: there is no {target}")
            elif anchor and anchor not in anchors(there.read_text()):
                faults.append(f"{page.name}: {target} has no #{anchor}")
    assert not faults, "\n".join(faults)


def anchors(text: str) -> set[str]:
    """Of its headings, as renderers write them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
