"""Inference: predict, evaluate, generate, serve and verify. torch is imported only for a run's own weights."""
