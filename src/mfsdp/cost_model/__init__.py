"""What a step will take, in time and memory, before it runs."""
