"""OpenAI's request bodies for completions and chat completions, and what privmix makes of each field.

A field that cannot be honoured is accepted at the value at which it changes nothing, and refused by name at any other.
Sources: the OpenAI API reference (completions, chat completions); `top_k` is vLLM's extension.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeGuard

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

from services.gateway.errors import CUSTOM, from_validation
from services.privacy.shaping import SamplingOptions

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 128
# Below it the shaped distributions are one token each, and logits over it overflow in float32.
LEAST_TEMPERATURE = 0.01

GREEDY = (
    "greedy decoding would take every token from the public model alone and still be charged to the privacy budget; "
    "{fix}, or ask the public model directly"
)
NEVER_LEAVE = "distributions of the private models never leave the service; remove it"
OWN_RANDOMNESS = (
    "the privacy guarantee needs randomness that the client does not choose; remove it (answers cannot be reproduced)"
)
PENALTIES = "penalties on repeated tokens are not applied here; use 0"
NO_TOOLS = "this service answers with text only and calls no tools; remove it"
NOTHING_STORED = "requests and answers are kept nowhere; remove it"
TEXT_ONLY = "this service answers with plain text only; remove it"


def refused(code: str, message: str) -> PydanticCustomError:
    # The message is a template to pydantic: braces in it would be fields.
    return PydanticCustomError(CUSTOM + code, "{message}", {"message": message})


def _neutral(why: str, *values: object) -> BeforeValidator:
    """Accept `values` only (null is always accepted, before any field is looked at)."""

    def check(value: object) -> object:
        if not any(type(value) is type(neutral) and value == neutral for neutral in values):
            raise refused("unsupported_parameter", why)
        return value

    return BeforeValidator(check)


def _not_greedy(fix: str, greedy: Callable[[float], bool]) -> AfterValidator:
    def check(value: float) -> float:
        if greedy(value):
            raise refused("unsupported_value", GREEDY.format(fix=fix))
        return value

    return AfterValidator(check)


Temperature = Annotated[
    float, Field(ge=0, le=2), _not_greedy(f"use at least {LEAST_TEMPERATURE}", lambda t: t < LEAST_TEMPERATURE)
]
TopP = Annotated[float, Field(ge=0, le=1), _not_greedy("use a top_p above 0", lambda p: p == 0)]
TopK = Annotated[int, Field(ge=-1), _not_greedy("use a top_k above 1, or 0 for all tokens", lambda k: k == 1)]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise refused("invalid_type", "give a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise refused("invalid_value", f"give at most {MAX_STOPS} strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise refused("invalid_value", f"each string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


PromptText = str | list[int]


def _prompts(value: object) -> list[PromptText]:
    """One prompt or several, as text or as token ids: always a list of prompts."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_token_ids(item) for item in value):
            return value
    raise refused(
        "invalid_type",
        "give a string, a list of strings, a list of token ids, or a list of lists of token ids; not empty",
    )


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)


def _content(value: object) -> object:
    """The text of a message, given whole or as a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(part, dict) for part in value):
        raise refused("invalid_type", "give a string or a list of text parts")
    if any(part.keys() != {"type", "text"} or part["type"] != "text" for part in value):
        raise refused("unsupported_value", 'give parts of the form {"type": "text", "text": "..."} only')
    if not all(isinstance(part["text"], str) for part in value):
        raise refused("invalid_type", "the text of a part must be a string")
    return "\n".join(part["text"] for part in value)


def _ignored(kind: type) -> BeforeValidator:
    """Accept any value of this type: it changes no answer and is not kept."""

    def check(value: object) -> object:
        if not isinstance(value, kind):
            raise refused("invalid_type", f"give a value of type {kind.__name__}")
        return value

    return BeforeValidator(check)


Zero = Annotated[Any, _neutral(PENALTIES, 0, 0.0)]
Seed = Annotated[Any, _neutral(OWN_RANDOMNESS)]
LogitBias = Annotated[Any, _neutral("biases on single tokens are not applied here; remove it", {})]
IgnoredText = Annotated[str | None, _ignored(str)]


class _Body(BaseModel):
    """Strict types; a null stands for the field's default, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class StreamOptions(_Body):
    """`continuous_usage_stats` is vLLM's: usage so far in every chunk, not in a last one alone."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, _neutral("chunks are not padded here; use false", False)] = None


class GenerationRequest(_Body):
    """What both routes share."""

    prompt_field: ClassVar[str]
    """The field that an error about the prompt names."""

    model: str
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0

    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: LogitBias = None
    seed: Seed = None
    user: IgnoredText = None

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream", True):
            raise refused("invalid_value", "allowed only together with stream: true")
        return value

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request body.

        Raises:
            ApiError: 400 that names the first field at fault.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from None

    @property
    def options(self) -> SamplingOptions:
        return SamplingOptions(self.temperature, self.top_p, self.top_k if self.top_k > 0 else None)

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt_field = "prompt"

    prompt: Annotated[list[PromptText], BeforeValidator(_prompts)]
    echo: bool = False
    best_of: int | None = Field(None, ge=1)
    logprobs: Annotated[Any, _neutral(NEVER_LEAVE)] = None
    suffix: Annotated[Any, _neutral("text is only added after the prompt here; remove it", "")] = None

    @field_validator("best_of")
    @classmethod
    def _all_are_answers(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n", value):
            raise refused(
                "unsupported_value",
                "must equal n: candidates are not compared by their probabilities, since those never leave the service",
            )
        return value


class Message(_Body):
    """One turn of a chat; fields that answers carry are accepted while they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: Annotated[Any, _neutral("participants have no names here; remove it")] = None
    annotations: Annotated[Any, _neutral(TEXT_ONLY, [])] = None
    audio: Annotated[Any, _neutral(TEXT_ONLY)] = None
    function_call: Annotated[Any, _neutral(NO_TOOLS)] = None
    refusal: Annotated[Any, _neutral(TEXT_ONLY)] = None
    tool_calls: Annotated[Any, _neutral(NO_TOOLS, [])] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: OpenAI's developer messages are what others call system messages."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Annotated[Any, _neutral(NEVER_LEAVE, False)] = None
    top_logprobs: Annotated[Any, _neutral(NEVER_LEAVE, 0)] = None

    audio: Annotated[Any, _neutral(TEXT_ONLY)] = None
    function_call: Annotated[Any, _neutral(NO_TOOLS, "none")] = None
    functions: Annotated[Any, _neutral(NO_TOOLS, [])] = None
    metadata: Annotated[Any, _neutral(NOTHING_STORED, {})] = None
    modalities: Annotated[Any, _neutral(TEXT_ONLY, ["text"])] = None
    moderation: Annotated[Any, _neutral("answers are not moderated here; remove it")] = None
    parallel_tool_calls: Annotated[bool | None, _ignored(bool)] = None
    prediction: Annotated[Any, _neutral("predicted outputs are not used here; remove it")] = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_options: Annotated[Any, _neutral(NOTHING_STORED, {})] = None
    prompt_cache_retention: Annotated[Any, _neutral(NOTHING_STORED)] = None
    reasoning_effort: Annotated[Any, _neutral("the model does not reason apart; remove it", "none")] = None
    response_format: Annotated[Any, _neutral(TEXT_ONLY, {"type": "text"})] = None
    safety_identifier: IgnoredText = None
    service_tier: Annotated[Any, _neutral("there is one tier of service; remove it", "auto", "default")] = None
    store: Annotated[Any, _neutral(NOTHING_STORED, False)] = None
    tool_choice: Annotated[Any, _neutral(NO_TOOLS, "none", "auto")] = None
    tools: Annotated[Any, _neutral(NO_TOOLS, [])] = None
    verbosity: Annotated[Any, _neutral("the length of answers is set by max_tokens; remove it", "medium")] = None
    web_search_options: Annotated[Any, _neutral("the web is not searched here; remove it")] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise refused("invalid_value", "max_tokens says otherwise; give one of them")
        return value

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().token_limit
