"""Turns the models' rows into output distributions: shaping, projection onto balls, and means as integer weights."""
