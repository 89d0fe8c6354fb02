"""Open an artifact and run it, and say what works on this machine. Knows files, not models, tasks or data."""
