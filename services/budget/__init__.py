"""The privacy budget: a durable ledger, the actor that writes it, and the purse that coordinators pay from.

actor = start("ledger.db", Terms(ensemble=..., epsilon=8, delta=1e-5, order=5, adjacency=...), namespace="privmix")
purse = Purse(actor)
granted = await purse.take(protocol.event, 4)  # release at most so many tokens
"""

from services.budget.actor import NAME, start
from services.budget.errors import LedgerError
from services.budget.purse import Purse
from services.budget.reader import read
from services.budget.terms import Terms

__all__ = ["NAME", "LedgerError", "Purse", "Terms", "read", "start"]
