"""The checks of benchmarks/gpu_check.py, by subject; each runs in a process of its own."""
