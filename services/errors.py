"""Defines the errors whose messages tell a person what is wrong and how to fix it. Packages derive their own.

The command line prints them in one line, and exits with 2 for an `InputError` and with 1 for a `WorkError`.
"""


class InputError(Exception):
    """The input is invalid. The message names the field and the fix."""


class WorkError(Exception):
    """The work failed or is refused. The message names the failed part.

    A training, an evaluation or a generation keeps its finished results, and the same command continues from them.
    """


class KeysError(WorkError):
    """An operation on keys is refused. The message names the reason and the fix."""


class UnknownKey(KeysError):  # noqa: N818 (the name says the state)
    """No key has this id or name."""


class KeysUnavailable(KeysError):  # noqa: N818
    """The database of the keys cannot be used. The message says why."""
