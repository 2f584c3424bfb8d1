"""Files that are complete or not there, and what converts them."""
