"""Owns the work of those verbs whose imports are heavy. `cluster/commands` imports a file of it when its verb runs."""
