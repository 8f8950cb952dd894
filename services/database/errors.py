"""Defines the errors of databases. The messages name the fix."""


class DatabaseError(Exception):
    """The database cannot be used."""


class Missing(DatabaseError):  # noqa: N818 (the names say the state)
    """There is no database at this place."""


class Foreign(DatabaseError):  # noqa: N818
    """The file is no database, or belongs to another application."""


class Corrupt(DatabaseError):  # noqa: N818
    """The database is damaged."""


class Unavailable(DatabaseError):  # noqa: N818
    """The database could not be read or written now: a full or read-only disk, a lock, a lost connection."""


class Conflict(Unavailable):
    """A row violates a constraint."""
