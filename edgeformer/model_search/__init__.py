"""Search over models: which model and artifact is the cheapest one that is good enough for a device."""
