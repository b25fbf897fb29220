"""`ninfer-pool demo`: everyday traffic on the shipped model, with one lane and with the pool."""
