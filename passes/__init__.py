"""The passes: one verb, one file. Each takes a `Program` and rewrites it in place.

    interleave  microbatches of one program take turns           exchanged: what other parallelisms send
    collective  what they exchange is launched and waited for     travels while something computes
    fill        what does not need it runs beside it

    quantize weights that the model casts to FP8 are cast before they travel

    gather   parameters come from one all-gather per unit        correct: a program cannot run sharded
    reshard  what was gathered is freed after its last reader     without these three
    reduce   gradients leave through one reduce-scatter per unit

    prefetch launches of gathers move up                          fast: launches and waits move,
    defer    waits for reductions move down                       every value stays bitwise equal

    bucket   products write straight into gradient buffers        physical: where values lie
    probe    in some steps somebody looks at values
    host     saved activations go to host memory and come back
    pool     buffers get static slots                             and what carries them
    stream   lanes get process groups

Their order, and its reasons, stand in `mfsdp.pipeline`.
"""

if __name__ != "mfsdp.passes":
    raise ImportError(f"import the passes as mfsdp.passes, not as {__name__}: they would load twice")

from .bucket import bucket
from .collective import collective
from .defer import defer
from .fill import fill
from .gather import gather
from .host import host
from .interleave import interleave
from .pool import pool
from .prefetch import prefetch
from .probe import probe
from .quantize import quantize
from .reduce import reduce
from .reshard import reshard
from .stream import stream

__all__ = [
    "bucket",
    "collective",
    "defer",
    "fill",
    "gather",
    "host",
    "interleave",
    "pool",
    "prefetch",
    "probe",
    "quantize",
    "reduce",
    "reshard",
    "stream",
]
