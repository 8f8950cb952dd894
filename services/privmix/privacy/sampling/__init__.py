"""Provides secret randomness and exact sampling of tokens, noise and candidates."""
