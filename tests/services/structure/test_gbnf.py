"""Claim: a grammar in GBNF may use all of its escapes."""

import pytest

from privmix.structure import grammar
from tests.support.structure import engine, follows


@pytest.mark.parametrize(
    ("text", "admitted", "refused"),
    [
        (r'root ::= "a\n" "b"', "a\nb", "anb"),
        (r'root ::= "\x41" [\x41-\x43]+', "ABC", "AD"),
        (r'root ::= "\u00e9\U0001F600"', "é😀", "é"),
        (r'root ::= [a-z\-]+ "\/" [\u00e9]', "a-b/é", "a_b/é"),
        (r'root ::= "\x22\x5C" [^\]"\\]', '"\\a', '"\\]'),
        (r'root ::= "a\x01"{2}', "a\x01a\x01", "a\x01"),
        ('root ::= "x" # "\\q\nb ::= "y"', "x", "y"),
    ],
)
def test_escapes(text: str, admitted: str, refused: str) -> None:
    made = engine(grammar.of_grammar(text))
    assert follows(made, admitted)
    assert not follows(made, refused)
