#!/usr/bin/env bash
# Expected: a literal of a grammar is text, so a model writes it with the tokens of its characters, whatever it says;
#     llguidance marks special tokens by a syntax of their own.
# Is: with llguidance 1.7.6, a literal that is forced and contains the text of a special token of the model is tokenised
#     as that token by compute_ff_tokens, and the matcher then refuses the tokens that it has proposed itself.
# So: the engine's copy of the tokenizer gets other names for its special tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet llguidance==1.7.6 tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
names = ["</s>", "<filename>"]
rust = Tokenizer(models.BPE({character: at for at, character in enumerate([*alphabet, *names])}, []))
rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
rust.add_special_tokens(names)
tokenizer = LLTokenizer(rust.to_str(), eos_token=rust.token_to_id("</s>"))


def followed(literal: str) -> tuple[bool, int, bool]:
    """Returns whether the special token is among the forced ones, how many are admitted, and whether all are."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(f'start: "{literal}"'), log_level=0)
    forced = matcher.compute_ff_tokens()
    admitted = matcher.validate_tokens(forced) if forced else 0
    return rust.token_to_id("<filename>") in forced, admitted, bool(forced) and admitted == len(forced)


found = {literal: followed(literal) for literal in ("run <filename>", "run (filename)")}
print("llguidance", version("llguidance"), found)
assert found == {"run <filename>": (True, 4, False), "run (filename)": (False, 14, True)}, "it has changed"
PYTHON
