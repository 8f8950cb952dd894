"""Defines the error of a structure that the service does not accept."""


class StructureError(ValueError):
    """A structure is invalid, too large, or admits no text. The message quotes nothing of it."""
