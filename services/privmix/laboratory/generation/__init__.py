"""Owns the report on the quality of synthetic text that `privmix generate` wrote. Start at `quality.py`."""
