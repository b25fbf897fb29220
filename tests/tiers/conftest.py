"""Stores that the tests share."""

from tests.tiers.stores import made, store

__all__ = ["made", "store"]
