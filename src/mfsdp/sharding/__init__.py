"""From modules to units: what fully_shard takes, how modules come to read their parameters, and the eager path."""
