"""Errors that a person can mend: their messages name what is wrong and what to do."""


class InputError(Exception):
    """Something that was given cannot be used. The message names it and says what to do."""


class WorkError(Exception):
    """A training, an evaluation or a generation could not be finished. The message names the part that failed.

    What was finished is kept: the same command goes on from there.
    """
