"""Tiers below the device: host memory and disk."""

from ninfer_pool.tiers.payload import ArrayPayload, Payload, Regions, Row
from ninfer_pool.tiers.rates import Rates
from ninfer_pool.tiers.setup import disk_shelf, host_shelf, open_tiers
from ninfer_pool.tiers.tiers import Tiers

__all__ = [
    "ArrayPayload",
    "Payload",
    "Rates",
    "Regions",
    "Row",
    "Tiers",
    "disk_shelf",
    "host_shelf",
    "open_tiers",
]
