"""Traces, geometry, bounds, and hit rate against K and bytes; never imports torch."""
