"""The encoder of paper A."""
