"""Runtimes: what opens an artifact, builds it, and says whether it can run here."""
