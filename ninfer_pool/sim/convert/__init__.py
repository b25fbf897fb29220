"""How other people's logs become traces; `ninfer_pool.sim.converters.convert` is the way in."""
