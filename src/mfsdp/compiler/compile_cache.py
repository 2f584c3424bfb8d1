"""Keeps compiled programs in torch's caches, so that a restart runs neither the passes nor a compiler.

Note [Warm starts]
For a graph that Dynamo traced, AOTAutograd's cache records where Inductor's cache has the code of its forward and
backward. On a hit neither the passes nor a lowering run. So mfsdp puts a `CachedProgram` into Inductor's cache: the
code, and the backend's facts about the program (names, collectives that ranks compare, which arguments are shards).

The key covers everything that decides what the passes do: torch's own key (the traced graph with its specs, its inputs,
torch's version and settings), and `cache_key` (every source file of this package, options, units with layouts). Graphs
that the key cannot describe (user-defined passes, DTensors of other parallelisms) and graphs whose listings are
requested are compiled again. Each rank looks up its own cache: ranks compare programs when they run them
(Note [Desync detection]), never while they compile.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.compiler._cache as torch_cache
from torch import fx
from torch._inductor.codecache import FxGraphCache, InductorCacheArtifact
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch.distributed.tensor import DTensor

from ..config.options import Options
from ..cost_model.auto_prefetch import Key, agree
from ..dtensor import te_linear
from ..pipeline import Table
from ..runtime import groups
from ..runtime.compiled_program import CompiledProgram
from ..runtime.program_info import ProgramInfo
from .capture import Capture
from .compile_workers import afterwards
from .lowering import Run
from .stitched import Stitched, part

log = logging.getLogger("mfsdp")


class CachedProgram:
    """A compiled program, as the backend returns it and as Inductor's cache loads it. The cache expects
    ``CompiledFxGraph``s: attributes that are missing here come from the first body. Private in torch (``FxGraphCache``,
    ``CompiledFxGraph``); tried on 2.11, 2.13 and 2.15, not on the others of 2.11 to 2.15.

    Args:
        code: runs the program.
        info: facts about the program.
        about: a line for the log.
        decided: prefetch depths that ranks have agreed on (Note [One prefetch depth]).
    """

    _triton_bundle = guards_expr = extern_libs_key = None

    def __init__(self, code: Run, info: ProgramInfo, about: str, decided: Mapping[Key, int] | None = None):
        self.code, self.info, self.about, self.decided = code, info, about, dict(decided or {})
        self._boxed_call = True  # on the instance: torch's wrappers copy instance attributes
        self._run = CompiledProgram(info, code)

    def __call__(self, args: list[Any]) -> object:
        return self._run(args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "code" not in self.__dict__ or not self._bodies:
            raise AttributeError(name)
        return getattr(self._bodies[0], name)

    @property
    def _bodies(self) -> Sequence[CompiledFxGraph]:
        bodies: Any = self.code.bodies.values() if isinstance(self.code, Stitched) else [self.code]
        return list(bodies)

    def keep(self) -> None:
        """Puts the program into Inductor's cache under a hash of its content; AOTAutograd reads the key. A program that
        cannot be stored is compiled again the next time.
        """
        if not self._bodies or not all(isinstance(body, CompiledFxGraph) for body in self._bodies):
            return
        try:
            content = pickle.dumps(self)
        except Exception as error:
            log.info("mfsdp: %s cannot be kept in the cache: %s: %s", self.about, type(error).__name__, error)
            return
        key = "f" + hashlib.sha256(content).hexdigest()[:51]
        afterwards(lambda: _store(key, pickle.dumps(self)))  # once its kernels are compiled
        self._fx_graph_cache_key = key
        self._fx_graph_cache_debug_lines: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        code, state = self.code, {"info": self.info, "about": self.about, "decided": self.decided}
        if isinstance(code, Stitched):
            frozen = dict(zip(code.bodies, map(_frozen, self._bodies), strict=True))
            return {"code": (code.driver, frozen, code.dying, code.constants, code.graphs.sites), **state}
        return {"code": _frozen(self._bodies[0]), **state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        code = state.pop("code")
        self.__init__(Stitched(*code) if isinstance(code, tuple) else code, **state)  # type: ignore[misc]

    def after_deserialization(self, constants: object) -> str:
        """Loads the code.

        Raises:
            OSError: code is missing, or other ranks use another prefetch depth; the cache treats this as a miss.
        """
        for key, depth in self.decided.items():
            if (other := agree(key, depth)) != depth:
                raise OSError(f"prefetch was {depth} here, and is {other} on other ranks")
        for body in self._bodies:
            loaded, _ = FxGraphCache.cache_hit_post_compile(body, {}, CompiledFxGraphConstants())
            if loaded is None:
                raise OSError("code that a program calls is not in the cache")
        return str(self._bodies[0].cache_key)

    def post_compile(self, inputs: Sequence[object], constants: object, kwargs: Any) -> None:
        """Prepares compiled code in the process that will run it."""
        for body in self._bodies:
            with part([]):
                body.post_compile([], CompiledFxGraphConstants(), kwargs)
        log.info("mfsdp: %s, from the cache", self.about)


def _store(key: str, content: bytes) -> None:
    """Puts an entry into Inductor's cache and records it for ``save_cache_artifacts``. Private in torch
    (``_write_to_local_cache``, ``CacheArtifactRecorder``, before ``CacheArtifactManager``); tried on 2.11, 2.13, 2.15.
    """
    kind = InductorCacheArtifact.type()
    if hasattr(torch_cache, "CacheArtifactRecorder"):
        torch_cache.CacheArtifactRecorder(kind, key).record(content)
    else:
        torch_cache.CacheArtifactManager.record_artifact(kind, key, content)
    FxGraphCache._write_to_local_cache(key, content)


def _frozen(body: CompiledFxGraph) -> CompiledFxGraph:
    out = copy.copy(body)
    out.prepare_for_serialization()
    return out


OF_THE_RUN: dict[str, Any] = {"passes": None, "patience": None, "on_stall": "report"}
"""Options that do not affect a program, with the values that the key uses; passes are described separately."""


def cache_key(capture: Capture, options: Options, passes: Table, gm: fx.GraphModule, decide: object = None) -> str:
    """Returns a key for everything that decides the backend's result and is not in torch's own key; ``""``: no
    caching. ``decide``: what chooses the prefetch depth and places copies; its ``repr`` contains its inputs.
    """
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    functions = [(name, getattr(function, "func", function)) for name, function in passes]
    rows = [(name, f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', '')}") for name, f in functions]
    own = all(text.startswith("mfsdp.") for _, text in rows)
    if not own or capture.wrapped or any(isinstance(v, DTensor) for v in values):
        return ""
    axes = sorted({name for unit in capture.units for name in unit.spec.groups if name})
    facts = (
        sources(), platform.python_version(), replace(options, **OF_THE_RUN), rows, groups.world(),
        [groups.axis_of(name) for name in axes], capture.name, capture.input_names,
        sorted(capture.shards.items()), sorted(capture.whole), sorted(capture.plain.items(), key=lambda item: item[0]),
        decide, sorted(capture.treated.items()), te_linear.version(),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@functools.cache
def sources(folder: Path = Path(__file__).parent.parent) -> str:
    """Returns a hash of every source file below a folder, by default of this package."""
    files = (Path(top, name) for top, _, names in os.walk(folder, followlinks=True) for name in names)
    found = hashlib.sha256()
    for path in sorted(file for file in files if file.suffix == ".py"):
        found.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()
