"""Owns structured answers: which tokens may come next in a text that follows a schema, a choice or a grammar.

All of it is public. Start at `matcher.py`, which follows one text and says which tokens may follow and which must, and
`ending.py`, which knows how it can end soon.
Before that, `grammar.py` translates what a request says (a JSON Schema with `schema_grammar.py`), `limits.py` refuses
what is too large, and `compiler.py` makes an engine for each answer. Answers share nothing.

What a client writes is translated and compiled first by `trials.py`, in processes with limits of memory and time
(`trial_process.py`). A gateway does neither itself; a coordinator compiles only what passed there.
"""
