"""What a fork server does once for all the ranks that it starts: it imports, and compiles a model in each lowering.

Without it the first compilation of a rank takes four CPU seconds, with it one. Ranks are forked where there is no
other thread: one computes, tqdm (of which Inductor makes a bar) starts none, and autograd needs none for the CPU.
"""

from __future__ import annotations

import gc
import os
import shutil

import hypothesis.strategies  # noqa: F401
import torch
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.distributed.tensor.parallel
import torch.hub
from torch import nn

import mfsdp
import tests.helpers.models  # noqa: F401

torch.set_num_threads(1)
torch.hub.tqdm.monitor_interval = 0


def compile_once(lowering: str) -> None:
    with mfsdp.fake_ranks(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        mfsdp.fully_shard(model, units=["0", "2"], device="cpu")
        run = torch.compile(model, backend="mfsdp", dynamic=False, options={"lowering": lowering})
        run(torch.ones(2, 4)).sum().backward()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


if not torch.version.cuda:  # such a build's autograd refuses in children of a process that has run a backward
    compile_once("eager")
    if shutil.which(os.environ.get("CXX", "g++")):
        compile_once("inductor")
gc.collect()
gc.freeze()
