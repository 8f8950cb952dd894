"""The request bodies that the gateway accepts, and what privmix makes of each field.

Sources: the OpenAI API reference (completions, chat completions); vLLM's extensions of it (`top_k`, `ignore_eos`,
`/tokenize`, `/detokenize` and the fields accepted at their neutral values).
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.gateway.errors import from_validation
from services.gateway.fields import (
    LEAST_TEMPERATURE,
    NEVER_LEAVE,
    REFUSE,
    Content,
    IgnoredFlag,
    IgnoredText,
    Nearest,
    Neutral,
    PromptTexts,
    Seed,
    Stops,
    Temperature,
    TopK,
    TopP,
    refused,
)
from services.privacy.mollifiers.shaping import SamplingOptions

PENALTIES = "penalties on repeated tokens are not applied here; remove it"
FILTERS = "tokens are chosen by temperature, top_p and top_k only; remove it"
ALL_SEARCH = "answers are sampled, not searched for; remove it"
ENDS = "an answer ends at the model's end token, a stop string or max_tokens; remove it"
NO_TOOLS = "this service answers with text only and calls no tools; remove it"
NOTHING_STORED = "requests and answers are kept nowhere; remove it"
TEXT_ONLY = "this service answers with plain text only; remove it"
OWN_TEMPLATE = "the model's own chat template is used; remove it"
WHOLE_PROMPT = "prompts are used as they are given; remove it"

Unlimited = Annotated[Any, Neutral(FILTERS)]
OneFloat = Annotated[Any, Neutral(PENALTIES, 1.0)]
Zero = Annotated[Any, Neutral(PENALTIES, 0.0)]


class Body(BaseModel):
    """Strict types. A null stands for the field's default, as in OpenAI's API; an unknown field may be null, false or
    empty, because then it asks for nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _asks_for_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        return {key: value for key, value in data.items() if value is not None and (key in known or _asks(value))}

    @classmethod
    def parse(cls, body: bytes, nearest: Nearest = REFUSE) -> Self:
        """Read a request body.

        Raises:
            ApiError: 400 that names the first field at fault.
        """
        try:
            return cls.model_validate_json(body, context=nearest)
        except ValidationError as error:
            raise from_validation(error) from None


def _asks(value: object) -> bool:
    return not (value is False or value == [] or value == {})


class StreamOptions(Body):
    """`continuous_usage_stats` is vLLM's: usage so far in every chunk, not in a last one alone."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, Neutral("chunks are not padded here; use false", False)] = None


class GenerationRequest(Body):
    """What both routes share."""

    prompt_field: ClassVar[str]
    """The field that an error about the prompt names."""

    model: str
    n: int = Field(1, ge=1, description="Choices for each prompt; every token of every choice is charged.")
    max_tokens: int | None = Field(None, ge=1)
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = Field(None, description="Used only together with stream: true.")
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = Field(0, description="0 or -1: all tokens.")
    ignore_eos: bool = Field(False, description="Go on after the model's end token, up to max_tokens.")
    seed: Seed = None
    user: IgnoredText = None

    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: OneFloat = None
    length_penalty: OneFloat = None
    no_repeat_ngram_size: Annotated[Any, Neutral(PENALTIES, 0)] = None
    logit_bias: Annotated[Any, Neutral("biases on single tokens are not applied here; remove it", {})] = None
    min_p: Annotated[Any, Neutral(FILTERS, 0.0)] = None
    typical_p: Annotated[Any, Neutral(FILTERS, 1.0)] = None
    allowed_token_ids: Unlimited = None
    bad_words: Annotated[Any, Neutral(FILTERS, [])] = None
    use_beam_search: Annotated[Any, Neutral(ALL_SEARCH, False)] = None
    early_stopping: Annotated[Any, Neutral(ALL_SEARCH, False)] = None
    min_tokens: Annotated[Any, Neutral(ENDS, 0)] = None
    stop_token_ids: Annotated[Any, Neutral(ENDS, [])] = None
    include_stop_str_in_output: Annotated[Any, Neutral(ENDS, False)] = None
    skip_special_tokens: Annotated[Any, Neutral("special tokens have no text here; use true", True)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral("special tokens have no text here; use true", True)] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral(TEXT_ONLY, False)] = None
    return_token_ids: Annotated[Any, Neutral(TEXT_ONLY, False)] = None
    prompt_logprobs: Annotated[Any, Neutral(NEVER_LEAVE, 0)] = None
    truncate_prompt_tokens: Annotated[Any, Neutral(WHOLE_PROMPT, -1)] = None
    priority: Annotated[Any, Neutral("requests of one key are served in their order; remove it", 0)] = None

    @property
    def greedy(self) -> bool:
        """Whether the client asks for the most likely token each time."""
        return self.temperature < LEAST_TEMPERATURE or self.top_p == 0 or self.top_k == 1

    def options(self, nearest: Nearest = REFUSE) -> SamplingOptions:
        """How to sample; a greedy request that was accepted is sampled at `nearest.greedy_temperature`."""
        if self.greedy and nearest.greedy_temperature is not None:
            return SamplingOptions(nearest.greedy_temperature)
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

    prompt: PromptTexts
    echo: bool = False
    best_of: int | None = Field(None, ge=1, description="Must equal n.")
    add_special_tokens: Annotated[Any, Neutral("special tokens of the model are added; use true", True)] = None
    logprobs: Annotated[Any, Neutral(NEVER_LEAVE, False)] = None
    suffix: Annotated[Any, Neutral("text is only added after the prompt here; remove it", "")] = None

    @field_validator("best_of")
    @classmethod
    def _all_are_answers(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != info.data.get("n", value):
            raise refused(
                "unsupported_value",
                "must equal n: candidates are not compared by their probabilities, since those never leave the service",
            )
        return value


class Message(Body):
    """One turn of a chat. Fields that answers carry are accepted while they are empty; reasoning is left out."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Annotated[Any, Neutral("participants have no names here; remove it")] = None
    reasoning: IgnoredText = None
    reasoning_content: IgnoredText = None
    annotations: Annotated[Any, Neutral(TEXT_ONLY, [])] = None
    audio: Annotated[Any, Neutral(TEXT_ONLY)] = None
    function_call: Annotated[Any, Neutral(NO_TOOLS)] = None
    refusal: Annotated[Any, Neutral(TEXT_ONLY, "")] = None
    tool_calls: Annotated[Any, Neutral(NO_TOOLS, [])] = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: OpenAI's developer messages are what others call system messages."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Annotated[Any, Neutral(NEVER_LEAVE, False)] = None
    top_logprobs: Annotated[Any, Neutral(NEVER_LEAVE, 0)] = None

    add_generation_prompt: Annotated[Any, Neutral(OWN_TEMPLATE, True)] = None
    audio: Annotated[Any, Neutral(TEXT_ONLY)] = None
    chat_template: Annotated[Any, Neutral(OWN_TEMPLATE)] = None
    chat_template_kwargs: Annotated[Any, Neutral(OWN_TEMPLATE, {})] = None
    function_call: Annotated[Any, Neutral(NO_TOOLS, "none")] = None
    functions: Annotated[Any, Neutral(NO_TOOLS, [])] = None
    metadata: Annotated[Any, Neutral(NOTHING_STORED, {})] = None
    modalities: Annotated[Any, Neutral(TEXT_ONLY, ["text"])] = None
    moderation: Annotated[Any, Neutral("answers are not moderated here; remove it")] = None
    parallel_tool_calls: IgnoredFlag = None
    prediction: Annotated[Any, Neutral("predicted outputs are not used here; remove it")] = None
    prompt_cache_key: IgnoredText = None
    prompt_cache_options: Annotated[Any, Neutral(NOTHING_STORED, {})] = None
    prompt_cache_retention: Annotated[Any, Neutral(NOTHING_STORED)] = None
    reasoning_effort: Annotated[Any, Neutral("the model does not reason apart; remove it", "none")] = None
    response_format: Annotated[Any, Neutral(TEXT_ONLY, {"type": "text"})] = None
    safety_identifier: IgnoredText = None
    service_tier: Annotated[Any, Neutral("there is one tier of service; remove it", "auto", "default")] = None
    store: Annotated[Any, Neutral(NOTHING_STORED, False)] = None
    tool_choice: Annotated[Any, Neutral(NO_TOOLS, "none", "auto")] = None
    tools: Annotated[Any, Neutral(NO_TOOLS, [])] = None
    verbosity: Annotated[Any, Neutral("the length of answers is set by max_tokens; remove it", "medium")] = None
    web_search_options: Annotated[Any, Neutral("the web is not searched here; remove it")] = None

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


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a prompt or a chat, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refused("invalid_value", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
