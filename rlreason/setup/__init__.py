"""Put the rooms of a run together from its config: the only folder that reads configuration and builds parts.

The parts themselves get plain values.
"""
