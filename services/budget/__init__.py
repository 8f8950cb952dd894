"""The privacy budget: a durable ledger, the actor that writes it, and the purse that coordinators pay from.

budget = PrivacyBudget(ensemble=..., epsilon=8, delta=1e-5, order=5, adjacency="user")
actor = start("ledger.db", budget, namespace="privmix")
purse = Purse(actor)
granted = await purse.take(protocol.event, 4)  # release at most `granted` tokens
"""

from services.budget.actor import NAME, start
from services.budget.errors import LedgerError
from services.budget.privacy_budget import PrivacyBudget
from services.budget.purse import Purse
from services.budget.reader import read

__all__ = ["NAME", "LedgerError", "PrivacyBudget", "Purse", "read", "start"]
