"""Flat buffers, one per unit: main weights, what is gathered of them, gradients, and checks of both."""
