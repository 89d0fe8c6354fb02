"""Weights that were trained elsewhere become a run."""
