"""Inductor pads strides on GPUs and not on CPUs; here, and in the ranks that tests start, it does on CPUs too."""

import importlib.util
import sys
from unittest.mock import MagicMock

import pytest
import torch._inductor.config

torch._inductor.config.disable_padding_cpu = False

if importlib.util.find_spec("hypothesis") is None:  # ``make gpu SYSTEM=1``, on a machine as it is
    absent = MagicMock(__path__=[], __spec__=None)
    absent.given = lambda *args, **kwargs: pytest.mark.skip(reason="no hypothesis here")
    absent.settings = lambda *args, **kwargs: lambda test: test
    sys.modules |= {"hypothesis": absent, "hypothesis.strategies": absent.strategies}
