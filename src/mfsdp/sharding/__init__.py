"""From modules to units: `fully_shard`, how modules read their parameters, and the eager fallback."""
