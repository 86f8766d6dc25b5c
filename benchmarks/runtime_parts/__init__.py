"""What benchmarks/runtime.py is made of: a module per question, and what they share."""
