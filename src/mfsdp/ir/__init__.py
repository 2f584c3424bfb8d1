"""Programs: operations, roles, edits, memory costs, the invariants and their verifier, and the listing."""
