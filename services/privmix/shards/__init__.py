"""Owns one engine: the Ray actor around it, and what it computes from rows before they leave it.

Start at `shard.py`, the actor. `reducer.py` reduces the rows of a step on the device that computed them.
"""
