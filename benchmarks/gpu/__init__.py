"""Measurements on an NVIDIA card: one script per question, one JSON of figures each."""
