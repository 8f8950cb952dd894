"""Defines errors whose messages tell a person what is wrong and how to fix it."""


class InputError(Exception):
    """The input is invalid. The message names the field and the fix."""


class WorkError(Exception):
    """A training, an evaluation or a generation failed. The message names the failed part.

    Finished results are kept, and the same command continues from them.
    """
