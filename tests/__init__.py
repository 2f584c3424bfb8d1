"""Inductor pads strides on GPUs and not on CPUs; here, and in the ranks that tests start, it does on CPUs too."""

import torch._inductor.config

torch._inductor.config.disable_padding_cpu = False
