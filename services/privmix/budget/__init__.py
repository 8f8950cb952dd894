"""Owns the privacy budget: a durable ledger, the actor that writes it, and the coordinators' client.

Start at `actor.py`: coordinators ask this Ray actor, by `client.py`, to charge tokens. `ledger.py` is the one writer.
It commits records (`records.py`) in rows (`store/rows.py`) that `chain.py` links; `state.py` is what follows from
them, and `reading.py` reads it. `filter.py` decides what still fits: by Rényi divergences, by a counter
(`token_counter.py`) or, part by part, by `accounts.py`. `anchor.py` stores the end of the chain elsewhere, `receipt.py`
gives an ensemble its one ledger, and `statement.py` says what is spent and left.
"""
