"""Computes the cost of events: composition, conversion to (epsilon, delta), and worst cases."""

from privmix.privacy.accounting.composition import (
    ORDERS,
    Epsilon,
    Spent,
    epsilon,
    paid,
    pld,
    pld_epsilon,
    rdp,
    round_up,
    shown,
    stated,
)

__all__ = [
    "ORDERS",
    "Epsilon",
    "Spent",
    "epsilon",
    "paid",
    "pld",
    "pld_epsilon",
    "rdp",
    "round_up",
    "shown",
    "stated",
]
