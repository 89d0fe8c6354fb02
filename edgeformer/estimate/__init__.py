"""Estimating a device that is not here: work per graph node, a roofline, and what was learned on this host."""
