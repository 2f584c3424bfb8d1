"""What the project may say instead of being right, by feature of a case. A refusal that no feature of a case explains
is a failure, and so is one without words.
"""

from __future__ import annotations

import re

REFUSALS = ("DesyncError", "PeerLostError", "NotImplementedError", "RuntimeError", "UserWarning", "ValueError")
"""Types of exceptions that a refusal may have; programs raise the warning that parameters have no values."""

OURS = r"mfsdp|fully_shard|sharded|strategy|unit|no_sync|functional_call"
"""A refusal is in the project's own words: one of these is among them."""

KNOWN: dict[tuple[str, ...], str] = {
    ("sparse",): r"sparse",
    ("subclass",): r"TwoTensor|subclass",
    ("hole",): r"without elements|zero.size|no elements",
    ("codebook",): r"writ|wrote|in.place",
    ("clamped",): r"writ|wrote|in.place",
    ("renormed",): r"writ|wrote|in.place|max_norm",
    ("own",): r"parameters\(\)",
    ("differs",): r"\branks?\b",
    ("functional",): r"functional_call",
    ("data",): r"\.data|copy_",
    ("given_up",): r"no_sync|zero_grad|given up",
    ("penalty",): r"full_tensor|to_local|outside of",
    ("returned",): r"return|leaves",
    ("retain",): r"retain_graph",
    ("experts", "inner"): r"\branks?\b",
    ("experts", "patterns"): r"\branks?\b",
    ("experts", "micro"): r"no_sync|synchronis",
    ("differs", "micro"): r"no_sync|synchronis",
    ("strategy:0", "outer_strategy:optim"): r"outer_strategy",
    ("calls:mixed", "outer_strategy:optim"): r"outer_strategy",
    ("mesh:unnamed",): r"which axes",
    ("meta", "weight_norm"): r"nothing has initialised",
    ("calls", "tie"): r"tie weights before sharding",
    ("toggle", "micro"): r"no_sync|synchronis",
    ("fault:swallowed",): r"invariant 13|invariant 50|invariant 66|lost the other ranks at",
    ("fault:swallowed_by_all", "micro"): r"no_sync|zero_grad|given up",
    ("fault:ends",): r"has ended with Fault: in ",
    ("fault:left_out",): r"invariant 13|lost the other ranks at",
    ("fault:no_sync",): r"invariant 13|lost the other ranks at",
    ("fault:evaluation",): r"invariant 13",
    ("fault:full_tensor",): r"invariant 13",
}
"""What a refusal says, for cases that have all of these features."""


def explained(features: list[str], kind: str, message: str) -> bool:
    """Whether an exception is a refusal in words that a case with these features may get."""
    if kind == "Fault":  # the program's own
        return "fault:ends" in features
    if kind not in REFUSALS or not re.search(OURS, message):
        return False
    has = {*features, *(f.split(":")[0] for f in features)}
    known = (words for needs, words in KNOWN.items() if has.issuperset(needs))
    return any(re.search(words, message, re.DOTALL | re.IGNORECASE) for words in known)


LOST = r"[Cc]onnection (closed|reset)|Broken pipe|Read timeout"
"""What a rank says whose peer has gone: no words of ours, but its peer had some."""
