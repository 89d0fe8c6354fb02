"""Measure a bundle's artifacts on this host, each in a child process, and judge them for a device."""
