"""Plans and explains a training step before anything runs."""
