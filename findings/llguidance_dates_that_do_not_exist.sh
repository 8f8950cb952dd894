#!/usr/bin/env bash
# Expected: a string whose schema has the format `date`, `time` or `date-time` is one that a parser reads: llguidance
#     follows these formats, and checks how many days a month has. A number is one that a reader of JSON has as a finite one.
# Is: with llguidance 1.7.6 and 1.9.1, 29 February of a common year, the year 0000 and 23:59:60 of any day are admitted, which
#     Python's datetime refuses; `1e999` is a number, which Python and JavaScript read as infinity.
# So: structured answers that code parses need patterns of one's own for these formats, and digits that are bounded.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 1.7.6 1.9.1; do
    python3 -m venv --clear "$folder/env"
    "$folder/env/bin/pip" install --quiet "llguidance==$version" tokenizers==0.23.3
    "$folder/env/bin/python" - <<'PYTHON'
import json
from datetime import date, datetime
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
rust = Tokenizer(models.BPE({character: at for at, character in enumerate([*alphabet, "</s>"])}, []))
rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
rust.add_special_tokens(["</s>"])
tokenizer = LLTokenizer(rust.to_str(), eos_token=rust.token_to_id("</s>"))


def admits(schema: dict, value: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(value)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def text(format_: str, value: str) -> bool:
    return admits({"type": "string", "format": format_}, json.dumps(value))


found = {
    "2024-02-29": text("date", "2024-02-29"),
    "2024-02-30": text("date", "2024-02-30"),
    "2023-02-29": text("date", "2023-02-29"),
    "0000-01-01": text("date", "0000-01-01"),
    "2023-01-01T23:59:60Z": text("date-time", "2023-01-01T23:59:60Z"),
    "1e999": admits({"type": "number"}, "1e999"),
}
print("llguidance", version("llguidance"), found)
for wrong, parse in (("2023-02-29", date), ("0000-01-01", date), ("2023-01-01T23:59:60Z", datetime)):
    try:
        parse.fromisoformat(wrong)
    except ValueError as error:
        print(wrong, "in Python:", error)
    else:
        raise AssertionError("it has changed")
assert json.loads("1e999") == float("inf")
assert [found[value] for value in ("2024-02-29", "2023-02-29", "0000-01-01", "2023-01-01T23:59:60Z", "1e999")] == 5 * [True]
assert not found["2024-02-30"], "it has changed"
PYTHON
done
