"""Owns the work of those verbs whose imports are heavy. `commands` imports a file of it when its verb runs."""
