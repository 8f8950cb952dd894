"""Claim: a structural tag admits the texts that xgrammar's documentation describes, and can be finished anywhere."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from privmix.structure.compiler import begun, limits_of
from privmix.structure.errors import StructureError
from privmix.structure.grammar import of_structural_tag
from privmix.structure.vocabulary import Vocabulary
from tests.support.structure import described as trial_tokenizer

BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
CALL = {"type": "tag", "begin": "<f=a>", "content": BOOLEAN, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[a-z<]*/?"}, "end": ["</f>", "."]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL, OTHER]}
TEXT = {"type": "any_text"}


def follows(engine: LLMatcher, text: str) -> bool:
    engine.reset()
    tokens = list(text.encode())
    return bool(engine.try_consume_tokens(tokens) == len(tokens) and engine.is_accepting())


def check(tag: Any, admitted: str, refused: str) -> None:
    """Checks texts, which are separated by two spaces."""
    text = of_structural_tag(tag)
    engine = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=limits_of(text))
    assert not engine.is_error(), engine.get_error()
    assert [text for text in admitted.split("  ") if not follows(engine, text)] == []
    assert [text for text in refused.split("  ") if follows(engine, text)] == []


@pytest.mark.parametrize(
    ("described", "admitted", "refused"),
    [
        ({"type": "const_string", "value": "a/b\n"}, "a/b\n", "a/b"),
        (BOOLEAN, "true", "null"),
        (CALL, "<f=a>true</f>", "<f=a>true  true  <f=a>null</f>"),
        (OTHER, "<f=b>a</f>  <f=b><</f>  <f=b>.  <f=b>/.", "<f=b>A.  <f=b>a"),
        (
            TRIGGERED,
            "  x  <f=a>true</f>  x<f=a>true</f>y<f=b>b.z  <f=a>true</f><f=a>false</f>  a<  <f",
            "<f=  <f=c>  a<f=a>true  x<f=a>1</f>",
        ),
        (TRIGGERED | {"at_least_one": True}, "<f=a>true</f>  <f=b>.y<f=a>true</f>z", "  x  x<f=a>true</f>"),
        (TRIGGERED | {"stop_after_first": True}, "  x  x<f=a>true</f>", "<f=a>true</f>y  <f=b>.<f=b>."),
        (TRIGGERED | {"excludes": ["no"]}, "n o  n<f=b>no.", "no  ano<f=b>.  <f=b>.no"),
        (
            {"type": "tag", "begin": "<t>", "content": TRIGGERED, "end": "</t>"},
            "<t></t>  <t>a<f=a>true</f>b</t>",
            "<t>a  <t>a</t>b  <t><f=a></t>",
        ),
        (
            {"type": "dispatch", "rules": [["[", BOOLEAN], ["(", CALL]], "loop": False},
            "a  a[true  (<f=a>true</f>",
            "a[  a[truex  (true",
        ),
        ({**TEXT, "max_chars": 2, "excludes": ["x"]}, "  é  ab", "abc  x"),
        (
            {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "!"}, CALL]},
            "a!<f=a>true</f>",
            "a!",
        ),
        ({"type": "sequence", "elements": [TEXT, CALL, TEXT]}, "<f=a>true</f>  a<f=a>true</f>b", "a"),
        (
            {
                "type": "sequence",
                "elements": [{"type": "tag", "begin": "<t>", "content": TEXT, "end": "</t>"}, BOOLEAN],
            },
            "<t>a<b</t>true",
            "<t></t>  <t>a</t>b</t>true",
        ),
        ({"type": "or", "elements": [CALL, BOOLEAN]}, "<f=a>true</f>  false", "a"),
        (
            {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ","},
            "  <f=a>true</f>  <f=a>true</f>,<f=b>.",
            ",  <f=a>true</f><f=b>.",
        ),
        (
            {"type": "tags_with_separator", "tags": [CALL], "separator": "", "at_least_one": True},
            "<f=a>true</f>" * 2,
            "",
        ),
        ({"type": "optional", "content": CALL}, "  <f=a>true</f>", "<f=a>true</f>" * 2),
        ({"type": "plus", "content": CALL}, "<f=a>true</f>" * 2, ""),
        ({"type": "star", "content": CALL}, "  " + "<f=a>true</f>" * 2, "a"),
        ({"type": "repeat", "content": CALL, "min": 1, "max": 2}, "<f=a>true</f>" * 2, "  " + "<f=a>true</f>" * 3),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, "((x))  x", "(x"),
        ({"type": "tag", "begin": "", "content": {**TEXT, "excludes": ["b"]}, "end": ""}, "  a\né", "ab"),
    ],
)
def test_formats(described: Any, admitted: str, refused: str) -> None:
    check({"type": "structural_tag", "format": described}, admitted, refused)


def test_the_older_form_means_triggered_tags() -> None:
    structures = [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}]
    older = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    check(older, "  x<f=a>true</f>y", "<f=b>  <f=a>1</f>")
    assert of_structural_tag(json.dumps(older)) == of_structural_tag(older)


@pytest.mark.parametrize("described", [TRIGGERED, {"type": "sequence", "elements": [TEXT, CALL]}])
def test_an_end_is_known_anywhere(described: Any) -> None:
    words = Vocabulary.read(*trial_tokenizer())
    follower, start = begun(of_structural_tag({"format": described}), words)
    text = words.tokenizer.tokenize_str("a <<f=a>tr")
    for length in range(len(text) + 1):
        position = follower.after(text[:length])
        whole = [*text[:length], *position.forced, *(position.end or ())]
        assert length or position == start
        assert position.end is not None
        assert follower.after(whole).complete or follower.after(whole).end == ()


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"format": {"type": "token", "token": 5}}, "formats of tokens"),
        ({"format": {"type": "tune"}}, "a type of a format"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "style"),
        ({"format": {"type": "sequence", "elements": [TEXT, BOOLEAN]}}, "free text"),
        ({"format": TRIGGERED | {"triggers": ["<g"]}}, "exactly one of the triggers"),
        ({"format": TRIGGERED | {"triggers": ["<f", "<f="]}}, "exactly one of the triggers"),
        ({"format": CALL | {"content": {"type": "json_schema", "json_schema": {"type": "rat"}}}}, "type in the root"),
        ({"format": CALL | {"begin": {"type": "token", "token": 5}}}, "begin is no string"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "max_tokens"),
        ({"format": {"type": "repeat", "content": CALL, "min": 0, "max": 10**9}}, "at most"),
        ({"structures": [{"begin": 1}], "triggers": []}, "begin is no string"),
        ({}, "a format is no object"),
        ([], "no object"),
        ("[", "JSON text"),
    ],
)
def test_what_is_not_supported_is_named(tag: Any, words: str) -> None:
    with pytest.raises(StructureError, match=words):
        of_structural_tag(tag)
