"""Compare benchmarks/core of two checkouts."""
