from __future__ import annotations

import difflib
import gc
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden texts instead of comparing them")
    parser.addoption("--record", type=Path, help="folder for a record of the run: outcomes, seconds, figures")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        from tests.helpers.record import Record

        config.pluginmanager.register(Record(config.getoption("--record")))


TELLING = ("test_nccl", "test_gpu", "test_fake_ranks", "test_te", "test_races", "test_host")
"""Files in the order in which ``-m gpu`` runs them; others come behind."""


LONGEST = (
    "test_captured_step", "test_pipelining", "test_plan", "test_quantize", "test_tensor_parallel", "test_quantized",
    "test_step_prefetch", "test_lightning", "test_accelerate", "test_explain", "test_profile", "test_pass_properties",
    "test_races", "test_transformers_native", "test_backend", "test_parallel_example", "test_expert_parallel",
    "test_cuda_models", "test_crash", "test_host", "test_qlora", "test_operators", "test_elastic", "test_zero_grad",
    "test_muon", "test_parity", "test_attention_masks", "test_transformers_parallel", "test_command", "test_overlapped",
    "test_together", "test_gone", "test_outlining", "test_subgraphs", "test_watchdog", "test_auto",
    "test_planning_parallel", "test_unused", "test_stable_addresses", "test_evaluation", "test_demo", "test_curve",
    "test_warm_start", "test_saving", "test_strategies", "test_schedule", "test_megatron_door", "test_written_rows",
    "test_checkpoint", "test_transport", "test_streams",
)  # fmt: skip
"""Files that take longest, which begin first: of several workers none is left alone with one at the end."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file has none of the tests that are asked for: with ``-m gpu``, if none is marked; without some marks,
    if all are. To import it, and the framework that it tests, takes seconds, or fails on a machine as it is.
    """
    if not collection_path.match("test_*.py"):
        return None
    text, asked = collection_path.read_text(), config.getoption("-m")
    if asked == "gpu":
        return True if "pytest.mark.gpu" not in text else None
    if re.fullmatch(r"not \w+( and not \w+)*", asked) is None:
        return None
    of_all = re.search(r"^pytestmark = (.*?)^\S", text, re.MULTILINE | re.DOTALL)
    marks = re.findall(r"pytest\.mark\.(\w+)", of_all[1]) if of_all else []
    return True if {f"not {mark}" for mark in marks} & set(asked.split(" and ")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    order = TELLING if config.getoption("-m") == "gpu" else LONGEST
    rank = {name: i for i, name in enumerate(order)}
    if config.getoption("--accept"):
        items[:] = [item for item in items if "golden" in getattr(item, "fixturenames", ())]
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    for item in items:
        if item.get_closest_marker("inductor") and compiler is None:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler (g++ or clang++): Inductor cannot compile"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine_torch") is None:
            item.add_marker(pytest.mark.skip(reason="no TransformerEngine here: make te builds it"))


def pytest_collection_finish() -> None:
    """What has been imported stays: garbage collections need not go through it, and are fewer."""
    from tests.helpers.ranks import SELDOM

    gc.collect()
    gc.freeze()
    gc.set_threshold(*SELDOM)


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_leaves_behind() -> Iterator[None]:
    """Goes with the file; what stays is not gone through again, or collections would take longer and longer."""
    import torch

    yield
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def _ranks(world: int, start: str = "spawn") -> Iterator[object]:
    from tests.helpers.ranks import Ranks

    ranks = Ranks(world, start=start)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[object]:
    yield from _ranks(1, "forkserver")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[object]:
    yield from _ranks(2)


@pytest.fixture
def two_fresh_ranks() -> Iterator[object]:
    """Two ranks for one test, which leaves them behind in a state that others should not see. Forked
    ones hash strings alike; two_ranks, as those that torchrun starts, do not.
    """
    yield from _ranks(2, "forkserver")


@pytest.fixture(scope="module")
def ranks() -> Iterator[object]:
    """Two ranks for the tests of one file, which leave them, or a framework in them, not as others find it."""
    yield from _ranks(2, "forkserver")


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[object]:
    yield from _ranks(3, "forkserver")


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[object]:
    yield from _ranks(4, "forkserver")


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[object]:
    yield from _ranks(8, "forkserver")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text equals tests/goldens/NAME.txt, whole; ``--accept`` writes it."""

    def check(name: str, text: str) -> None:
        path = ROOT / "tests" / "goldens" / f"{name}.txt"
        if request.config.getoption("--accept"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="ascii")
            return
        want = path.read_text(encoding="ascii") if path.exists() else ""
        if text != want:
            diff = difflib.unified_diff(want.splitlines(), text.splitlines(), "golden", "now", lineterm="")
            pytest.fail(f"{path.name} differs (make goldens accepts it, once read):\n" + "\n".join(diff))

    return check
