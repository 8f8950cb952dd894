"""What can go wrong while an ensemble is made, in words an operator can act on."""


class InputError(Exception):
    """Something that was given cannot be used; the message names it and says what to do."""


class TrainingError(Exception):
    """An adapter could not be trained; the message names it. Finished ones are kept."""
