"""Programs: their operations, roles and edits, what they cost in bytes, the laws, and the listing."""
