"""Scores and predictions of the artifacts of a bundle, and of a run's own weights. torch only for the latter."""
