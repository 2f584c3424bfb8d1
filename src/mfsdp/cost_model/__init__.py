"""Predicts a step's time and memory before it runs."""
