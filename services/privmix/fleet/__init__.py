"""Owns the shards: the Ray actors that hold the parts' models.

Start at `fleet.py`, the actor that starts, replaces and ends shards. `shard_map.py` says which shard holds which
parts; coordinators get it from the fleet. `size.py` stores how many shards an operator chose.
"""
