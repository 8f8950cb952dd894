"""Claim: every invalid line of an input file is reported by its number, and no message repeats text of the file."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privmix.batches.lines import MAX_ERRORS, model_of, read_lines

ENDPOINT = "/v1/completions"


def line(custom_id: object = "a", **changes: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "privmix", "prompt": "p"}}
    return json.dumps({**request, **changes}).encode()


def test_lines_keep_their_numbers_and_bodies() -> None:
    content = b"\xef\xbb\xbf" + line("a") + b"\r\n\n" + line("b", body={"model": "privmix", "prompt": "\ud800"}) + b"\n"
    lines, errors = read_lines(content, ENDPOINT, 10)
    assert errors == []
    assert [(line.number, line.custom_id) for line in lines] == [(1, "a"), (3, "b")]
    assert json.loads(lines[0].body) == {"model": "privmix", "prompt": "p"}
    assert model_of(lines) == "privmix"


@pytest.mark.parametrize(
    ("content", "code", "number", "param"),
    [
        (b"", "empty_file", None, "input_file_id"),
        (b"\n \n", "empty_file", None, "input_file_id"),
        (line("a") + b"\n{", "invalid_json_line", 2, None),
        (b"\xff\xfe", "invalid_json_line", 1, None),
        (b"[1]", "invalid_json_line", 1, None),
        (b"[" * 100_000, "invalid_json_line", 1, None),
        (b"{}", "missing_required_parameter", 1, "custom_id"),
        (line(""), "invalid_custom_id", 1, "custom_id"),
        (line(7), "invalid_custom_id", 1, "custom_id"),
        (line("x" * 513), "invalid_custom_id", 1, "custom_id"),
        (line(method="GET"), "invalid_method", 1, "method"),
        (line(url="/v1/chat/completions"), "mismatched_endpoint", 1, "url"),
        (line(body="p"), "invalid_body", 1, "body"),
        (line("a") + b"\n" + line("a"), "duplicate_custom_id", 2, "custom_id"),
        (b"\n".join(line(str(number)) for number in range(4)), "too_many_lines", None, "input_file_id"),
    ],
)
def test_an_error_names_its_line_and_field(content: bytes, code: str, number: int | None, param: str | None) -> None:
    _, (error,) = read_lines(content, ENDPOINT, 3)
    assert (error.code, error.line, error.param) == (code, number, param)


def test_reading_stops_after_a_number_of_errors() -> None:
    _, errors = read_lines(b"\n".join([b"x"] * 1000), ENDPOINT, 10)
    assert len(errors) == MAX_ERRORS


@pytest.mark.parametrize("model", [["privmix"], {}, 7, None, "priv\ud83d", "x\x00", "x" * 1000])
def test_a_model_that_no_record_can_hold_is_none(model: object) -> None:
    lines, errors = read_lines(
        line("a", body={"model": model}) + b"\n" + line("b", body={"model": model}), ENDPOINT, 10
    )
    assert (len(lines), errors, model_of(lines)) == (2, [], None)


@given(
    st.binary(max_size=300)
    | st.lists(st.text(max_size=30)).map(lambda texts: "\n".join(texts).encode("utf-8", "replace"))
)
def test_any_bytes_yield_lines_or_errors(content: bytes) -> None:
    lines, errors = read_lines(content, ENDPOINT, 10)
    assert lines or errors


def test_no_error_repeats_the_text() -> None:
    _, errors = read_lines(b'{"custom_id": "Wilhelmina", "method": "Wilhelmina"}\nWilhelmina', ENDPOINT, 10)
    assert "Wilhelmina" not in repr(errors)
