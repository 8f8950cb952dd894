"""The terms of a budget of epsilon 8."""

from privmix.budget.privacy_budget import PrivacyBudget

CLINIC = PrivacyBudget(ensemble="clinic", epsilon=8.0, delta=1e-5, order=8.0, adjacency="one part added or removed")
