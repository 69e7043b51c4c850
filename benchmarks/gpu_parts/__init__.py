"""The parts of `benchmarks/gpu.py`. Order: options, floors, models, steps, report; then what measures."""
