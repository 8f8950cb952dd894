"""Claim: earlier calls of tools and their results reach the model, whatever its chat template knows of them."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from privmix.requests.conversation import ChatWriter
from privmix.requests.errors import ApiError
from privmix.requests.models import PromptTokenizer, prompts_of
from privmix.requests.schema import ChatRequest, Message
from privmix.training import public_model

PLAIN = "{% for m in messages %}<{{ m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
# As Qwen's: arguments are an object.
OBJECTS = """{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] -%}
[{{ call.function.name }} {{ call.function.arguments.items() | list }}]{% endfor %}{{ '\n' }}{% endfor %}"""
# As DeepSeek's: arguments are text, and only a message without content has calls.
TEXTS = """{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for call in m.tool_calls -%}
[{{ call.function.name + ' ' + call.function.arguments }}]{% endfor %}{% else %}{{ m.content }}
{%- endif %}{{ '\n' }}{% endfor %}"""
# As Mistral's: ids have nine characters; as Llama's: a message has one call.
ONE_CALL = """{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 or m.tool_calls[0].id | length != 9 %}{{ raise_exception('no') }}{% endif -%}
[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments }}]{% else %}{{ m.content }}
{%- if m.role == 'tool' %} of {{ m.tool_call_id }} {{ m.name }}{% endif %}{% endif %}{{ '\n' }}{% endfor %}"""


def call(name: str, id_: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(id_: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


USER: dict[str, Any] = {"role": "user", "content": "When is it open?"}
ONE: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [call("hours", "call_a", day="Monday")]},
]
ONE_TURN: list[dict[str, Any]] = [*ONE, result("call_a", "at nine")]
TWO_CALLS = [call("hours", "a", day="Monday"), call("hours", "b", day="Friday")]
TWO_TURN: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "Well.", "tool_calls": TWO_CALLS},
    result("b", "at ten"),
    result("a", "at nine"),
    {"role": "assistant", "content": "At nine and at ten."},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def prompts() -> PromptTokenizer:
    return prompts_of(public_model.resolve())


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    def render(written: list[dict[str, Any]]) -> str:
        (text,), _ = render_jinja_template([written], chat_template=template)
        return str(text)

    body = {"model": "privmix", "messages": messages}
    return render(ChatWriter(render).messages(ChatRequest.parse(json.dumps(body).encode()).messages))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN, '<assistant>{"name": "hours", "arguments": {"day": "Monday"}}\n<user>Result of hours:\nat nine\n'),
        (OBJECTS, "<assistant>[hours [('day', 'Monday')]]\n<tool>at nine\n"),
        (TEXTS, '<assistant>[hours {"day": "Monday"}]\n<tool>at nine\n'),
        (ONE_CALL, "<assistant>[hours {'day': 'Monday'}]\n<tool>at nine of 000000001 hours\n"),
    ],
    ids=["plain", "objects", "texts", "one call"],
)
def test_a_template_gets_calls_in_its_own_format(template: str, expected: str) -> None:
    assert rendered(template, ONE_TURN) == f"<user>When is it open?\n{expected}"


def test_a_template_that_knows_one_call_gets_several_as_text() -> None:
    monday, friday = (f'{{"name": "hours", "arguments": {{"day": "{day}"}}}}' for day in ("Monday", "Friday"))
    results = "Result of hours:\nat ten\nResult of hours:\nat nine"
    for template in (PLAIN, ONE_CALL):
        assert rendered(template, TWO_TURN) == (
            f"<user>When is it open?\n<assistant>Well.\n{monday}\n{friday}\n<user>{results}\n"
            "<assistant>At nine and at ten.\n<user>Thanks.\n"
        )


def test_several_results_are_those_of_their_calls() -> None:
    text = rendered(OBJECTS, TWO_TURN)
    assert "<assistant>Well.[hours [('day', 'Monday')]][hours [('day', 'Friday')]]\n<tool>at ten\n<tool>at nine" in text


def test_a_chat_without_calls_is_not_changed() -> None:
    chat = [{"role": "developer", "content": "Be brief."}, USER]
    assert rendered(PLAIN, chat) == "<system>Be brief.\n<user>When is it open?\n"


@pytest.mark.anyio
async def test_the_public_models_prompt_has_the_calls_and_their_results(prompts: PromptTokenizer) -> None:
    (tokens,) = await prompts.chat_tokens([Message.model_validate(message) for message in ONE_TURN], 8192)
    text = await prompts.text(list(tokens))
    assert '{"name": "hours", "arguments": {"day": "Monday"}}' in text
    assert "Result of hours:\nat nine" in text


def assistant(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def called(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "hours", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (ONE, "messages", "invalid_value"),
        ([*ONE, USER, result("call_a", "at nine")], "messages", "invalid_value"),
        ([*ONE_TURN, result("call_a", "at nine")], "messages", "invalid_value"),
        ([USER, result("call_a", "at nine")], "messages", "invalid_value"),
        ([*ONE, result("call_b", "at nine")], "messages", "invalid_value"),
        ([USER, assistant(TWO_CALLS[0], TWO_CALLS[0]), result("a", "x")], "messages", "invalid_value"),
        ([USER, {"role": "tool", "content": "a"}], "messages[1].tool_call_id", "missing_required_parameter"),
        ([USER | {"tool_call_id": "a"}], "messages[0].tool_call_id", "unsupported_parameter"),
        ([USER | {"tool_calls": TWO_CALLS}], "messages[0].tool_calls", "unsupported_parameter"),
        ([USER, assistant()], "messages[1].content", "missing_required_parameter"),
        ([*ONE, result("call_a", "x") | {"content": None}], "messages[2].content", "missing_required_parameter"),
        ([assistant(called("{"))], "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ([assistant(called("[]"))], "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ([assistant(called('{"a": NaN}'))], "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ([assistant(called('{"a": "\\ud800"}'))], "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ([assistant(called("[" * 100_000))], "messages[0].tool_calls[0].function.arguments", "invalid_value"),
        ([assistant({"id": "a"})], "messages[0].tool_calls[0].function", "missing_required_parameter"),
        ([assistant(*[call("f", str(n)) for n in range(65)])], "messages[0].tool_calls", "invalid_value"),
        ([assistant(call("a b", "a"))], "messages[0].tool_calls[0].function.name", "invalid_value"),
    ],
)
def test_a_chat_whose_calls_and_results_do_not_match_is_refused(messages: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        ChatRequest.parse(json.dumps({"model": "privmix", "messages": messages}).encode())
    assert (refusal.value.param, refusal.value.code) == (param, code)


@pytest.mark.parametrize(
    "message",
    [
        assistant(call("hours", "a") | {"index": 0}),
        assistant(called("")),
        assistant(called("{}"), content=""),
        assistant(called("{}"), content=[]),
        assistant(called("{}"), content=[{"type": "text", "text": "Well.", "cache_control": None, "annotations": []}]),
    ],
)
def test_what_clients_send_back_is_accepted(message: dict[str, Any]) -> None:
    messages = [USER, message, result("a", "at nine") | {"name": "hours"}]
    ChatRequest.parse(json.dumps({"model": "privmix", "messages": messages}).encode())
