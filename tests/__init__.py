"""Inductor pads strides on GPUs and not on CPUs; here, and in the ranks that tests start, it does on CPUs too."""

import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

# Ranks and tests share one cache of compiled C++ (it is most of the time), and compile in their own process. They
# compute on one thread: several add up an embedding's gradient in any order. Read when torch is imported.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parent.parent / ".cache" / "inductor"))
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Otherwise each process tries all vector extensions of the CPU before its first kernel: two CPU seconds, twenty with an
# empty cache. Set it to nothing if the compiler is older than the CPU.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["OMP_NUM_THREADS"] = "1"

# Of a run on several workers, the first process hands tests out: it needs no torch, and they wait for it.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv:
    import torch._inductor.config

    torch._inductor.config.disable_padding_cpu = False

if importlib.util.find_spec("hypothesis") is None:  # ``make gpu SYSTEM=1``, on a machine as it is
    absent = MagicMock(__path__=[], __spec__=None)
    absent.given = lambda *args, **kwargs: pytest.mark.skip(reason="no hypothesis here")
    absent.settings = lambda *args, **kwargs: lambda test: test
    sys.modules |= {"hypothesis": absent, "hypothesis.strategies": absent.strategies}
