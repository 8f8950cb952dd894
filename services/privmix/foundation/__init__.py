"""Owns what every package may stand on and what knows nothing of theirs: errors, files, retries, Ray.

Each file stands alone, or on another file of this room. `errors.py` is the one tree of errors. `compiled.py`,
`errors.py`, `lazily.py`, `retrying.py`, `turns.py` and `units.py` import nothing of privmix, so the packages that
import no other, such as the mathematics of privacy, may use these.
"""
