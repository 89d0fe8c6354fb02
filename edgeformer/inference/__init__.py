"""Inference: predict, evaluate, generate and verify. torch is imported only for a run's own weights."""
