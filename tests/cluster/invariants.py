"""Checks what clients received against what was charged. Pure functions; `tests.cluster.charges` reads.

Every token that a client received was charged before, so `received <= charged`. At rest, tokens are charged that no
client received only where a fault explains them:

- A coordinator charges leases in advance. A lease whose owner dies, or whose settlement does not reach the ledger,
  stays charged in full. An owner has at most `OPEN_LEASES`, of at most `Margin.lease_tokens` each.
- A token is charged before its delivery. If a coordinator is killed, the last deltas do not arrive: at most
  `IN_FLIGHT` tokens of each answer. If the network or a gateway fails, a coordinator that nobody hears may continue
  every answer to its end.
- The tokens of a step are paid for and then drawn, before a shard that holds the step's weights names them. If it
  fails in between, the step is repeated, and its tokens count as sampled: one of each answer. A share counts no more
  than the request reserved, so a key whose answers are whole does not pay for them.
- A stream that breaks does not show what was released after its last chunk: at most what it still wanted.
- A rolled-back ledger is charged with all that its anchors know, and its open leases are charged in full.

If no fault of these kinds happened, the margin is 0 and both counts are equal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.cluster.charges import Charges
from tests.cluster.clients import Transcript
from tests.counting import counted

OPEN_LEASES = 3
"""A client of the budget has at most three leases: the one in use, the next, and one that is being settled."""
IN_FLIGHT = 3
"""The steps whose deltas a killed coordinator may not have delivered: one computed, one queued, one on the network."""


@dataclass(frozen=True)
class Margin:
    """Bounds the tokens that faults may leave charged although no client received them (see this module).

    Attributes:
        lost_leases: the number of times that a coordinator's open leases may have stayed charged.
        lease_tokens: the most tokens of one lease.
        kills: the number of times that the deltas of a coordinator may have been lost on their way.
        steps: the number of times that each answer may have lost a step to a shard that failed.
        abandoned: the number of times that a coordinator may have continued answers that nobody received.
    """

    lost_leases: int = 0
    lease_tokens: int = 0
    kills: int = 0
    steps: int = 0
    abandoned: int = 0

    def tokens(self, streams: Sequence[Transcript]) -> int:
        """Returns the bound for these clients of the service."""
        wanted = sum(stream.wanted for stream in streams)
        return (
            self.lost_leases * OPEN_LEASES * self.lease_tokens
            + (self.kills * IN_FLIGHT + self.steps) * len(streams)
            + self.abandoned * wanted
            + sum(stream.missing for stream in streams)
        )


def text_violations(transcripts: Iterable[Transcript]) -> list[str]:
    """Describes lost, repeated and wrong tokens, and answers that the server counts differently."""
    return [violation for transcript in transcripts for violation in _text_violations(transcript)]


def charge_violations(
    before: Charges,
    after: Charges,
    streams: Sequence[Transcript],
    margin: Margin = Margin(),
    parts: Iterable[int] | None = None,
) -> list[str]:
    """Describes charges that differ from what clients received. `before` and `after` are read at rest.

    Args:
        parts: the numbers of parts that the service had over time; None for any.
    """
    received = sum(stream.tokens for stream in streams)
    charged, most = after.tokens - before.tokens, margin.tokens(streams)
    violations = _bounded("the ledger", charged, received, most)
    if after.promised is None or after.epsilon is None or after.epsilon > after.promised:
        violations.append(f"tokens left after the budget's end: epsilon is {after.epsilon} of {after.promised}")
    if parts is not None and not after.parts <= set(parts):
        violations.append(f"tokens were drawn from {sorted(after.parts)} parts, of {sorted(parts)}")
    for key in after.by_key:
        own = [transcript for transcript in streams if transcript.key == key]
        spent = after.by_key[key] - before.by_key.get(key, 0)
        missing = sum(transcript.missing for transcript in own)
        violations += _bounded(f"the key {key}", spent, sum(transcript.tokens for transcript in own), missing)
    return violations


def _bounded(account: str, charged: int, received: int, margin: int) -> list[str]:
    if charged < received:
        return [f"{account} charged {charged} tokens, and clients received {received}"]
    if charged > received + margin:
        return [f"{account} charged {charged} tokens for {received} received, with a margin of {margin}"]
    return []


def _text_violations(transcript: Transcript) -> list[str]:
    name, words = f"the answer to {transcript.start}", transcript.words
    violations = []
    expected = [str(number) for number in counted(transcript.start, len(words))]
    if (place := next((at for at, word in enumerate(words) if word != expected[at]), None)) is not None:
        heard = "repeats" if words[place] in words[:place] else "skips to"
        violations.append(f"{name} {heard} {words[place]} at token {place + 1}, where {expected[place]} follows")
    if len(words) > transcript.wanted:
        violations.append(f"{name} has {len(words)} tokens of {transcript.wanted} wanted")
    if transcript.end == "length" and len(words) < transcript.wanted:
        violations.append(f"{name} ended after {len(words)} tokens of {transcript.wanted} wanted")
    text = ""
    for chunk in transcript.chunks:
        text += chunk.text
        if chunk.usage is not None and chunk.usage != len(text.split()):
            violations.append(f"{name} had {len(text.split())} tokens when the server counted {chunk.usage}")
            break
    return violations
