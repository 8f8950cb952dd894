"""Owns what measures and attacks the service; the server never imports it.

`evaluation` measures every protocol on held-out text, `audit` attacks the claims, and `heads` trains small models of
tables. Start at `evaluation/evaluate.py`.
"""
