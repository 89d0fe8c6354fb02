"""This computer: processor, threads, power, NVIDIA cards and drivers."""
