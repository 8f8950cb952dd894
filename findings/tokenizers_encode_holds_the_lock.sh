#!/usr/bin/env bash
# Expected: tokenizers works in Rust, so another Python thread runs while a long text is encoded,
#     as it does while a batch is encoded.
# Is: with tokenizers 0.23.3, Tokenizer.encode holds Python's global lock from beginning to end, so a thread in which a
#     long text is encoded stops all others, an event loop too. encode_batch and encode_batch_fast release it.
# So: what must not block others encodes a batch of one text, in a thread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet tokenizers==0.23.3
"$folder/env/bin/python" - <<'PYTHON'
import threading
import time

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

print("tokenizers", tokenizers.__version__)
vocabulary = {"[UNK]": 0} | {str(number): number + 1 for number in range(1000)}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
text = " ".join(str(number % 1000) for number in range(1_000_000))


def stopped(encode) -> float:
    """Returns the longest time for which this thread stood still, as a share of the time of the call in another."""
    took = []

    def call() -> None:
        begun = time.perf_counter()
        encode()
        took.append(time.perf_counter() - begun)

    thread = threading.Thread(target=call)
    longest, before = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
        time.sleep(0.001)
    return max(longest, time.perf_counter() - before) / took[0]


shares = {
    "encode": stopped(lambda: tokenizer.encode(text)),
    "encode_batch": stopped(lambda: tokenizer.encode_batch([text])),
    "encode_batch_fast": stopped(lambda: tokenizer.encode_batch_fast([text])),
}
print("longest standstill of another thread, as a share of the call:", {name: round(at, 2) for name, at in shares.items()})
assert shares["encode"] > 0.9, "it has changed"
assert shares["encode_batch"] < 0.7 and shares["encode_batch_fast"] < 0.7, "it has changed"
PYTHON
