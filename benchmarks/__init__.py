"""Benchmarks, one command per file: core, peers, runner, server, tiers, hit_rate_vs_k, compare."""
