"""CRT-Deep of paper B."""
