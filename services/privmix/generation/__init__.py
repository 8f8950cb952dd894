"""Generates synthetic text from a private ensemble: a resumable job and its data card."""
