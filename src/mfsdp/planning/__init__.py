"""What a training run will do and cost, before anything runs."""
