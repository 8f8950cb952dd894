"""Generates synthetic text from a private ensemble: a resumable job, its data card, and a report of its quality."""
