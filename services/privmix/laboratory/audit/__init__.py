"""Attacks on the released tokens: what an auditor proves against a claim, and what an attacker learns."""
