"""The parts of benchmarks/runtime.py and dropin.py: a module per question, and shared helpers."""
