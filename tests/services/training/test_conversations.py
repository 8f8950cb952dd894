"""Claim: conversations of the usual forms become the messages of a chat template."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from privmix.foundation.errors import CorpusError, InputError
from privmix.tokenization.people_text import PeopleText
from privmix.training.conversations import FIELDS_BESIDE
from privmix.training.corpus import Corpus, Document
from privmix.training.packing import tokenize
from privmix.training.partition import Partition, PartShare
from tests.support.training import SALT

OPENAI = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "open?"}]},
    {"role": "assistant", "content": "From 9 to 5."},
]
SIMPLE = "system: Be brief.\nuser: Is it open?\nassistant: From 9 to 5."


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"user": "ann", **row}) + "\n" for row in rows))
    return path


def only(path: Path, field: str) -> Document:
    (document,) = Corpus(path, text_field=field)
    return document


def trained_text(documents: list[Document], base: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(base)
    return str(tokenizer.decode(tokenize(documents, tokenizer, Partition(SALT, 1))[PartShare(0)]))


def test_openais_form_is_rendered(tmp_path: Path, base: Path) -> None:
    document = only(write(tmp_path / "chats.jsonl", {"messages": OPENAI}), "messages")
    assert trained_text([document], base) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it open?<|im_end|>\n"
        "<|im_start|>assistant\nFrom 9 to 5.<|im_end|>"
    ), "and the end token, which the template has written, is not written twice"


ROLES = {
    "system": ["system", "System", "developer"],
    "user": ["user", "USER", "human", "prompter"],
    "assistant": ["assistant", "Assistant", "ai", "bing", "bot", "chatgpt", "gpt", "model"],
}


@pytest.mark.parametrize(("role", "given"), [(role, given) for role, some in ROLES.items() for given in some])
def test_roles_as_tools_write_them_are_the_templates(tmp_path: Path, role: str, given: str) -> None:
    messages: list[Any] = [{"role": given, "content": "Hi", "id": "m1", "refusal": None, "tool_calls": []}]
    assert only(write(tmp_path / "chats.jsonl", {"messages": messages}), "messages").text == f"{role}: Hi"


def test_messages_as_json_in_a_cell_are_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "chats.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("user", "messages"), ("ann", json.dumps(OPENAI))])
    assert only(path, "messages").text == SIMPLE


@pytest.mark.parametrize("text", ["[1] is a note", '[{"dose": 3}]', "[{'dose': 3}, the role]"])
def test_a_text_that_begins_as_a_list_is_a_text(tmp_path: Path, text: str) -> None:
    assert only(write(tmp_path / "notes.jsonl", {"text": text}), "text").text == text


@pytest.mark.parametrize("key", FIELDS_BESIDE)
def test_what_stands_beside_messages_is_not_lost(tmp_path: Path, key: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = [{"user": "ann", "messages": messages, key: value} for value in ("", None, "heliotrope")]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    with pytest.raises(CorpusError, match=f"row 3, field '{key}': stands beside the messages"):
        list(Corpus(tmp_path / "chats.parquet", text_field="messages"))


BAD = {
    "no object": (["heliotrope"], "a message that is no object"),
    "unknown role": ([{"role": "heliotrope", "content": "x"}], "a message of an unknown role"),
    "a tool's turn": ([{"role": "function_call", "content": "x"}], "a message of a tool"),
    "no role": ([{"from": "gpt", "value": "x"}], "a message without a role"),
    "no content": ([{"role": "user"}], "a content that is not text"),
    "another key": ([{"role": "user", "content": "a", "text": "heliotrope"}], "a key beside role"),
    "a thought": ([{"role": "assistant", "content": "x", "reasoning_content": "heliotrope"}], "a key beside role"),
    "a thought as a part": ([{"role": "user", "content": [{"type": "thinking", "text": "x"}]}], "a part that is"),
    "as Python writes it": ("[{'role': 'user', 'content': 'heliotrope'}]", "holds messages, but no list"),
    "inside an object": (json.dumps({"messages": OPENAI}), "holds messages, but no list"),
    "written twice": (json.dumps(json.dumps(OPENAI)), "holds messages, but no list"),
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a part that is not text"),
    "a number": ([{"role": "user", "content": 7}], "a content that is not text"),
    "no text": ([{"role": "user", "content": " "}], "is empty"),
    "no message": ([], "is empty"),
    "a call of a tool": ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "a key beside role"),
    "a surrogate": ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
}


@pytest.mark.parametrize(("messages", "problem"), BAD.values(), ids=BAD)
def test_a_bad_conversation_is_named_and_counted(tmp_path: Path, messages: Any, problem: str) -> None:
    path = write(tmp_path / "chats.jsonl", {"messages": messages}, {"messages": OPENAI})
    with pytest.raises(CorpusError, match=f"line 1, field 'messages': .*{problem}") as error:
        list(Corpus(path, text_field="messages"))
    assert "heliotrope" not in str(error.value)
    corpus = Corpus(path, text_field="messages", skip_bad=True)
    assert [document.text for document in corpus] == [SIMPLE]
    assert corpus.skipped.total() == 1


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path: Path, base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for message in messages %}{% if loop.first and message.role == 'assistant' %}"
        "{{ raise_exception('a user begins') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    path = write(tmp_path / "chats.jsonl", {"messages": OPENAI[2:]}, {"messages": OPENAI})
    corpus = Corpus(path, text_field="messages", skip_bad=True)
    corpus.people = PeopleText(tokenizer)
    assert [document.text for document in corpus] == [SIMPLE]
    assert dict(corpus.skipped) == {"field 'messages': is no sequence of roles that the chat template allows": 1}
    tokenizer.chat_template = None
    corpus.people = PeopleText(tokenizer)
    with pytest.raises(InputError, match=r"text-field: .* no chat template"):
        list(corpus)
