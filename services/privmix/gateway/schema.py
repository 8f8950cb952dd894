"""Defines the request bodies that the service accepts, and the types of their fields.

Sources: the OpenAI API reference (completions, chat completions); vLLM's extensions (`top_k`, `ignore_eos`,
`structured_outputs`, `/tokenize`). `unsupported.py` has the fields that are refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from privmix.gateway.errors import CUSTOM, from_validation
from privmix.gateway.settings import LEAST_TEMPERATURE, ClientSettings
from privmix.gateway.unsupported import has_effect
from privmix.privacy.mollifiers.shaping import SamplingOptions

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 128

GREEDY = (
    "greedy decoding would take every token from the public model alone and still be charged to the privacy budget; "
    "{fix}, or use the public model directly"
)
OWN_RANDOMNESS = (
    "the privacy guarantee needs randomness that the client does not choose; remove it (answers cannot be reproduced)"
)


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body, whose validation ends at its first error. Only that is answered, and to describe the errors of all
items of a large body takes pydantic seconds and a lot of memory."""


_DEFAULTS = ClientSettings()


def _settings(info: ValidationInfo) -> ClientSettings:
    """Returns the context of this validation."""
    return info.context if isinstance(info.context, ClientSettings) else _DEFAULTS


def refused(code: str, message: str) -> PydanticCustomError:
    """Returns a validation error with a code of OpenAI's API."""
    # Not the message itself, because pydantic treats it as a template.
    return PydanticCustomError(CUSTOM + code, "{message}", {"message": message})


def _not_greedy(fix: str, greedy: Callable[[float], bool]) -> AfterValidator:
    def check(value: float, info: ValidationInfo) -> float:
        if greedy(value) and _settings(info).greedy_temperature is None:
            raise refused("unsupported_value", GREEDY.format(fix=fix))
        return value

    return AfterValidator(check)


Temperature = Annotated[
    float, Field(ge=0, le=2), _not_greedy(f"use at least {LEAST_TEMPERATURE}", lambda t: t < LEAST_TEMPERATURE)
]
TopP = Annotated[float, Field(ge=0, le=1), _not_greedy("use a top_p above 0", lambda p: p == 0)]
TopK = Annotated[int, Field(ge=-1), _not_greedy("use a top_k above 1, or 0 for all tokens", lambda k: k == 1)]


def _seed(value: object, info: ValidationInfo) -> object:
    if value is not None and not _settings(info).ignore_seed:
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
    Items[str], BeforeValidator(_stops, json_schema_input_type=str | Annotated[list[str], Field(max_length=MAX_STOPS)])
]

PromptText = str | Items[int]


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
    Items[PromptText], BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


def _content(value: object) -> object:
    """Returns the text of a message, which is a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise refused("invalid_type", "give a string or a list of text parts")
    parts = [{key: field for key, field in part.items() if key == "text" or has_effect(key, field)} for part in value]
    if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in parts):
        raise refused("unsupported_value", 'give only parts of the form {"type": "text", "text": "..."}')
    if not all(isinstance(part["text"], str) for part in parts):
        raise refused("invalid_type", "the text of a part must be a string")
    return "\n".join(part["text"] for part in parts)


Content = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[dict[str, Any]])]


class Body(BaseModel):
    """A request body with strict types.

    Null means the default of the field, as in OpenAI's API. A field that is not here is ignored if its value asks for
    nothing (`unsupported.has_effect`). Of the others, only the first is an error (`Items`).
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted with any value, and neither used nor stored."""

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        others = data.keys() - known - cls.ignored
        unknown = next((key for key, value in data.items() if key in others and has_effect(key, value)), None)
        return {key: value for key, value in data.items() if value is not None and (key in known or key == unknown)}

    @classmethod
    def parse(cls, body: bytes, settings: ClientSettings = _DEFAULTS) -> Self:
        """Parses a request body.

        Raises:
            ApiError: 400, which names the first invalid field.
        """
        try:
            return cls.model_validate_json(body, context=settings)
        except ValidationError as error:
            raise from_validation(error) from None


class StreamOptions(Body):
    """Options of a stream. vLLM's `continuous_usage_stats` adds the usage so far to every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Body):
    """The schema of `response_format`. A name and a description are accepted; every schema is followed strictly."""

    ignored = frozenset({"name", "description", "strict"})
    schema_: dict[str, Any] | bool = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused("invalid_value", "give json_schema with the type json_schema, and only with it")
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: exactly one of the ways to describe the answer."""

    ignored = frozenset({"disable_any_whitespace", "disable_fallback"})
    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        wishes = [self.json_, self.regex, self.choice, self.json_object or None]
        if sum(wish is not None for wish in wishes) != 1:
            names = "json, regex, choice and json_object"
            raise refused("invalid_value", f"give exactly one of {names}")
        return self


class GenerationRequest(Body):
    """The fields that both generation routes share."""

    ignored = frozenset({"user"})
    prompt_field: ClassVar[str]
    """The name of the prompt's field, for errors."""
    default_tokens: ClassVar[int]
    """The length of an answer if the client sets none. An unlimited chat could spend the whole budget."""

    model: str
    n: int = Field(
        1, ge=1, description="The number of choices for each prompt. Every token of every choice is charged."
    )
    max_tokens: int | None = Field(None, ge=1)
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions = Field(StreamOptions(), description="Used only with stream: true.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = Field(0, description="0 or -1 allows all tokens.")
    ignore_eos: bool = Field(False, description="Continue after the model's end token, up to max_tokens.")
    seed: Seed = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's: the answer matches a JSON Schema, a regular expression or a choice."
    )

    @property
    def greedy(self) -> bool:
        """Whether the client requests greedy decoding."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0 or self.top_k == 1

    def options(self, settings: ClientSettings = _DEFAULTS) -> SamplingOptions:
        """Returns the sampling options. An accepted greedy request is sampled at `settings.greedy_temperature`."""
        if self.greedy and settings.greedy_temperature is not None:
            return SamplingOptions(settings.greedy_temperature)
        return SamplingOptions(self.temperature, self.top_p, self.top_k if self.top_k > 0 else None)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt_field = "prompt"
    default_tokens = 16  # as OpenAI's

    prompt: PromptTexts
    echo: bool = False


class Message(Body):
    """One message of a chat. Fields that only answers have are accepted if they are empty; reasoning is ignored."""

    ignored = frozenset({"reasoning", "reasoning_content"})
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


Messages = Annotated[Items[Message], Field(min_length=1)]


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    ignored = frozenset({"user", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"})
    prompt_field = "messages"
    default_tokens = 256

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)

    @field_validator("max_completion_tokens")
    @classmethod
    def _limits_agree(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise refused("invalid_value", "conflicts with max_tokens; give only one of them")
        return value

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a prompt or a chat, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refused("invalid_value", "give either prompt or messages")
        return self
