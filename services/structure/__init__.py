"""Owns structured answers: which tokens may come next in a text that follows a schema, a choice or a grammar.

All of it is public. Start at `matcher.py`, which follows one text and says which tokens may follow and which must.
Before that, `grammar.py` translates what a request says, `limits.py` and `satisfiable.py` refuse what cannot end,
`closing.py` closes objects, and `compiler.py` makes an engine for each answer. Answers share nothing.

What a client writes is translated and compiled first by `trials.py`, in processes with limits of memory and time
(`trial_process.py`). A gateway does neither itself; a coordinator compiles only what passed there.
"""
