"""Enforces the privacy budget with a durable ledger, the actor that writes it, and the coordinators' client.

budget = PrivacyBudget(ensemble=..., epsilon=8, delta=1e-5, order=5, adjacency="user")
actor = start("ledger.db", budget, namespace="privmix")
client = BudgetClient(actor)
async with client.reserve(protocol.event, 4) as reserved:  # compute at most `reserved.count` tokens
    reserved.mark_released(await reserved.charge(losses))  # release the first of them
"""

from privmix.budget.actor import NAME, start
from privmix.budget.client import BudgetClient
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import read
from privmix.foundation.errors import LedgerError

__all__ = ["NAME", "BudgetClient", "LedgerError", "PrivacyBudget", "read", "start"]
