"""Defines the base of options that a command line or a program sets."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from privmix.foundation.errors import InputError


class Options(BaseModel):
    """Validates immutable options. Unknown fields and numbers that are not finite are invalid."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Returns options with these values. Raises `InputError` that names the first invalid field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(problem(error)) from error


def problem(error: ValidationError) -> str:
    """Returns the first invalid field and why it is."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
