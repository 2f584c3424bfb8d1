"""The compiler passes, one per file. Each takes a `Program` and rewrites it in place.

    interleave        alternate the microbatches of one program           other parallelisms' collectives,
    collective        launch them early, wait for them late                overlapped
    hide_collectives  move independent compute behind their launches

    quantize          cast to FP8 before the gather, where the model casts weights to FP8

    gather            one all-gather per unit produces its parameters     required: without these three
    reshard           free the gathered buffer after its last reader      a program cannot run sharded
    reduce            one reduce-scatter per unit consumes its gradients

    prefetch          launch gathers earlier                              speed: launches and waits move,
    defer             wait for reductions later                           every value stays bitwise equal

    inplace_wgrad     products write into gradient buffers                memory: where values lie
    insert_checks     look for Inf and NaN, compare replicas
    schedule_offload  copy saved activations to the host and back
    plan_memory       assign static buffers
    assign_groups     assign process groups to reductions

`mfsdp.pipeline` defines their order and the reasons for it.
"""

if __name__ != "mfsdp.passes":
    raise ImportError(f"import the passes as mfsdp.passes, not as {__name__}: they would load twice")

from .assign_groups import assign_groups
from .collective import collective
from .defer import defer
from .gather import gather
from .hide_collectives import hide_collectives
from .inplace_wgrad import inplace_wgrad
from .insert_checks import insert_checks
from .interleave import interleave
from .plan_memory import plan_memory
from .prefetch import prefetch
from .quantize import quantize
from .reduce import reduce
from .reshard import reshard
from .schedule_offload import schedule_offload

__all__ = [
    "assign_groups",
    "collective",
    "defer",
    "gather",
    "hide_collectives",
    "inplace_wgrad",
    "insert_checks",
    "interleave",
    "plan_memory",
    "prefetch",
    "quantize",
    "reduce",
    "reshard",
    "schedule_offload",
]
