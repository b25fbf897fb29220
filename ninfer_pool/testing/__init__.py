"""For our own tests and for engine authors: a symbolic engine, an oracle, Hypothesis strategies.

`symbolic`, `oracle` and `driver` need nothing beside the core; `strategies` needs Hypothesis.
"""
