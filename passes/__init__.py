"""The passes: one verb, one file. Each takes a `Program` and rewrites it in place.

    gather   parameters come from one all-gather per unit        correct: a program cannot run sharded
    reshard  what was gathered is freed after its last reader     without these three
    reduce   gradients leave through one reduce-scatter per unit

Their order, and its reasons, stand in `mfsdp.pipeline`.
"""

if __name__ != "mfsdp.passes":
    raise ImportError(f"import the passes as mfsdp.passes, not as {__name__}: they would load twice")

from .gather import gather
from .reduce import reduce
from .reshard import reshard

__all__ = ["gather", "reduce", "reshard"]
