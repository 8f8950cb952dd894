"""Attacks on what the service releases: what an auditor can prove against a claim, and what an attacker gets."""
