"""Communication formats that are not plain dtypes: names and sizes. Integers only.

    int8    blocks of 128 elements: a byte each, and a scale of four bytes for each block; lossy

A message is one byte per element, padded to a multiple of four, followed by the scales. An incomplete last block has a
scale of its own.
"""

from __future__ import annotations

BLOCK = 128
"""Elements that share a scale."""

INT8 = "int8"


def int8_nbytes(numel: int) -> int:
    """Returns the bytes of ``numel`` elements in int8: 1 + 4/128 per element for large ``numel``."""
    return -(-numel // 4) * 4 + -(-numel // BLOCK) * 4


def refusal(given: object) -> str:
    """Returns why a value is no format; ``""`` if there is no specific reason."""
    name = str(given).lower().removeprefix("torch.").replace("_", "")
    if name in ("int8", "uint8"):
        return f"for eight bits in blocks of 128 with scales give the string {INT8!r}"
    if name.startswith(("int4", "uint4", "nf4")):
        return (
            "four bits keep 20 dB of a weight and of a sum of gradients, where int8 keeps 44 "
            f"(docs/guides/precision.md): too little to train with; give {INT8!r}"
        )
    if "fp4" in name or name.startswith("float4"):
        return (
            "NVFP4 and MXFP4 are for matrices that a device multiplies in them, and no such device has run this yet; "
            f"as a format of what travels alone they lose more than {INT8!r}"
        )
    if name.startswith(("fp8", "float8", "mxfp8", "e4m3", "e5m2")):
        return (
            f"eight bits of floating point keep 32 dB, where {INT8!r} keeps 44 in as many bytes "
            "(docs/guides/precision.md)"
        )
    return ""
