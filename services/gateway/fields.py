"""Defines the types of request fields: the values that each accepts, and its OpenAPI schema.

An unsupported field is accepted with values that have no effect, and refused by name with any other value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from services.gateway.errors import CUSTOM

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 128
# At lower temperatures, distributions collapse to one token and scaled logits overflow in float32.
LEAST_TEMPERATURE = 0.01

GREEDY = (
    "greedy decoding would take every token from the public model alone and still be charged to the privacy budget; "
    "{fix}, or use the public model directly"
)
NEVER_LEAVE = "probabilities of the private models never leave the service; remove it"
OWN_RANDOMNESS = (
    "the privacy guarantee needs randomness that the client does not choose; remove it (answers cannot be reproduced)"
)


@dataclass(frozen=True)
class Fallbacks:
    """Says what replaces requests that cannot be private. By default they are refused.

    The models of `schema` get it as pydantic's validation context.

    Attributes:
        greedy_temperature: the temperature for greedy requests (`temperature: 0`, `top_p: 0`, `top_k: 1`).
        ignore_seed: accept a `seed` without effect.
    """

    greedy_temperature: float | None = None
    ignore_seed: bool = False


REFUSE = Fallbacks()


def fallbacks(info: ValidationInfo) -> Fallbacks:
    """Returns the context of this validation."""
    return info.context if isinstance(info.context, Fallbacks) else REFUSE


def refused(code: str, message: str) -> PydanticCustomError:
    """Returns a validation error with a code of OpenAI's API."""
    # Not the message itself, because pydantic treats it as a template.
    return PydanticCustomError(CUSTOM + code, "{message}", {"message": message})


class Neutral:
    """Accepts only `values` (and null) for an unsupported field. `why` is the message for other values."""

    def __init__(self, why: str, *values: object) -> None:
        self._why = why
        self._values = values

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self._values], "description": self._why}

    def _check(self, value: object) -> object:
        if not any(_same(value, neutral) for neutral in self._values):
            raise refused("unsupported_parameter", self._why)
        return value


def _same(value: object, neutral: object) -> bool:
    """Compares JSON values: an integer equals its float, but a boolean equals no number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _of_type(kind: type) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise refused("invalid_type", f"give a value of type {kind.__name__}")
        return value

    return BeforeValidator(check)


IgnoredText = Annotated[str | None, _of_type(str), Field(description="Accepted, but neither used nor stored.")]
IgnoredFlag = Annotated[bool | None, _of_type(bool), Field(description="Accepted, but not used.")]


def _not_greedy(fix: str, greedy: Callable[[float], bool]) -> AfterValidator:
    def check(value: float, info: ValidationInfo) -> float:
        if greedy(value) and fallbacks(info).greedy_temperature is None:
            raise refused("unsupported_value", GREEDY.format(fix=fix))
        return value

    return AfterValidator(check)


Temperature = Annotated[
    float, Field(ge=0, le=2), _not_greedy(f"use at least {LEAST_TEMPERATURE}", lambda t: t < LEAST_TEMPERATURE)
]
TopP = Annotated[float, Field(ge=0, le=1), _not_greedy("use a top_p above 0", lambda p: p == 0)]
TopK = Annotated[int, Field(ge=-1), _not_greedy("use a top_k above 1, or 0 for all tokens", lambda k: k == 1)]


def _seed(value: object, info: ValidationInfo) -> object:
    if value is not None and not fallbacks(info).ignore_seed:
        raise refused("unsupported_parameter", OWN_RANDOMNESS)
    return value


Seed = Annotated[int | None, BeforeValidator(_seed), Field(description=OWN_RANDOMNESS)]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refused("invalid_type", "give a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refused("invalid_value", f"give at most {MAX_STOPS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise refused("invalid_value", f"each string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


Stops = Annotated[
    list[str], BeforeValidator(_stops, json_schema_input_type=str | Annotated[list[str], Field(max_length=MAX_STOPS)])
]

PromptText = str | list[int]


def _prompts(value: object) -> list[PromptText]:
    """Returns a list of prompts for one or several prompts, each as text or as token ids."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_token_ids(item) for item in value):
            return value
    raise refused(
        "invalid_type",
        "give a non-empty string, list of strings, list of token ids or list of lists of token ids",
    )


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)


PromptTexts = Annotated[
    list[PromptText], BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


def _content(value: object) -> object:
    """Returns the text of a message, which is a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise refused("invalid_type", "give a string or a list of text parts")
    if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in value):
        raise refused("unsupported_value", 'give only parts of the form {"type": "text", "text": "..."}')
    if not all(isinstance(part["text"], str) for part in value):
        raise refused("invalid_type", "the text of a part must be a string")
    return "\n".join(part["text"] for part in value)


Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, str]])]
