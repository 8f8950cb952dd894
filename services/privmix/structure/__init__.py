"""Owns structured answers: which tokens may come next in a text that follows a schema, a choice or an expression.

All of it is public. `grammar.py` translates what a request says, `limits.py` refuses what is too large, and
`compiler.py` begins an answer with llguidance. `matcher.py` follows one text and says which tokens may follow and which
must, and `ending.py` knows how it can end soon. Answers share nothing.

llguidance reads JSON Schemas itself and refuses what it does not support. It lets through (measured with 1.7.6, by
`tests/services/structure/test_schemas.py`):

- numbers that are infinite for a reader, such as `1e999`, where the schema gives no bound;
- `date` and `date-time` of the 29th of February of any year and of the year 0, and leap seconds at any minute;
- a whole-numbered exclusive bound itself, where the other bound has the same whole part;
- whole numbers that differ from a bound above 2**53 by less than a double can tell;
- the same name twice in an object, where the schema does not name it.
"""
