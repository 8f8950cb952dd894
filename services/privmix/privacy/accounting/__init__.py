"""Computes the cost of events: composition, conversion to (epsilon, delta), and worst cases."""

from privmix.privacy.accounting.composition import (
    EARLIER_ORDERS,
    ORDERS,
    Epsilon,
    Spent,
    epsilon,
    orders_for,
    paid,
    pld,
    pld_epsilon,
    rdp,
    round_up,
    shown,
    stated,
)

__all__ = [
    "EARLIER_ORDERS",
    "ORDERS",
    "Epsilon",
    "Spent",
    "epsilon",
    "orders_for",
    "paid",
    "pld",
    "pld_epsilon",
    "rdp",
    "round_up",
    "shown",
    "stated",
]
