"""Measure single artifacts on this host: worker processes, latency, memory, energy, conditions."""
