"""Measures what leaves a shard, and the reduction of rows beside the engine: `python -m tests.benchmarks.reduction`.

- `bytes_a_token`: for each `PROTOCOL,PARTS,SHARDS` the bytes that the shards return for one token of a sequence, with
  reduced rows and with raw ones (float32: the public row, and the rows of the parts that are drawn), and with weights
  that the only shard holds.
- `adding`: for each `PROTOCOL,GROUPS` the milliseconds of processor time from the sums of 64 sequences, as groups of
  parts send them, to integer weights, and the MB of those sums; `wide` is the same of sums in the type in which they
  are computed.
- `ms`: for each `PROTOCOL,VOCABULARY` the milliseconds of processor time, of all threads together, for sequences with
  `--rows` rows each, from log-probabilities to integer weights: reduced as by one shard, and of raw rows as by the
  coordinator, which copies them out of the object store first. The least of the repetitions, because other load only
  adds time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Answers, Protocol
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.reducer import Reduced, Reducer, Reduction
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show

PARTS, SHARDS = 80, (1, 2, 8)
RADIUS, TOKENS = 1.6, 1024
SHARE = WHOLE // TOKENS

# Protocols of a number of parts that ask one part, 16 of them, and all, and of how many rows each consists.
ASKED: Mapping[str, tuple[Protocol, int]] = {
    "pmixed": (PMixed(PARTS, 1.0, RADIUS), 1),
    "exponential": (Exponential(PARTS, 16, RADIUS), 16),
    "individual": (IndividualSettings(tokens=TOKENS).plan(PARTS), PARTS),
}


def rows_of_a_model(sequences: int, parts: int, vocabulary: int) -> Tensor:
    """Returns a public row and part rows of each sequence, [S (1 + n), V]: log-ratios of N(0, 0.7) to a steep p0."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.5 * torch.log(torch.arange(1, vocabulary + 1, dtype=torch.float32))
    public = torch.stack([falling[torch.randperm(vocabulary, generator=generator)] for _ in range(sequences)])
    rows = public[:, None].repeat(1, 1 + parts, 1)
    rows[:, 1:] += 0.7 * torch.randn((sequences, parts, vocabulary), generator=generator)
    return rows.flatten(0, 1).log_softmax(dim=1)


def reduction(protocol: Protocol, sequences: int, parts: int) -> Reduction:
    drawn = np.ones((sequences, parts), dtype=np.bool_)
    allowances = np.full((sequences, parts), SHARE) if protocol.event.accounts else None
    return Reduction(protocol, (SamplingOptions(),) * sequences, drawn, allowances)


def bytes_of(protocol: Protocol, asked: int, shards: int, vocabulary: int) -> dict[str, int]:
    """Returns the bytes for a token, from what the shards really return."""
    own = min(asked, PARTS // shards)
    rows, reducer = rows_of_a_model(1, own, vocabulary), Reducer()
    answers: list[Reduced] = []
    for _ in range(shards):
        public = answers[0].public if answers else None
        answers.append(reducer.reduce(rows, reduction(protocol, 1, own), public))
    measured = {"reduced": sum(answer.nbytes for answer in answers), "raw": 4 * vocabulary * (1 + asked)}
    return measured if shards > 1 else {**measured, "held": reducer.weigh(rows, reduction(protocol, 1, own))[0].nbytes}


def least_ms(work: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return round(1000 * min(seconds), 1)


def times(protocol: Protocol, sequences: int, parts: int, vocabulary: int, repeats: int) -> dict[str, float]:
    rows, reducer, given = (
        rows_of_a_model(sequences, parts, vocabulary),
        Reducer(),
        reduction(protocol, sequences, parts),
    )
    private = rows.view(sequences, 1 + parts, vocabulary)

    def reduced() -> None:
        answer = reducer.reduce(rows, given)
        assert answer.public is not None
        assert answer.sums is not None
        charges = None if answer.charges is None else torch.from_numpy(answer.charges)
        protocol.combine(torch.from_numpy(answer.public), torch.from_numpy(answer.sums), charges)

    def raw() -> None:
        models = [tuple(range(parts))] * sequences
        copied = private[:, 1:].flatten(0, 1)
        answers = shape(private[:, 0], copied, models, SamplingOptions(), overwrite_parts=True)
        allowances = None if given.allowances is None else torch.from_numpy(given.allowances)
        protocol.distribution(Answers(answers.public, answers.ratios, answers.models, allowances))

    return {"reduced": least_ms(reduced, repeats), "raw": least_ms(raw, repeats)}


def adding(protocol: Protocol, groups: int, sequences: int, vocabulary: int, repeats: int) -> dict[str, float]:
    """Compares sums as they leave a shard with those that were computed, as the coordinator gets them of each group."""
    rows = rows_of_a_model(sequences, 1, vocabulary)
    given = reduction(protocol, sequences, 1)
    public, _ = Reducer()._public(rows, given)
    computed, _ = Reducer()._partials(rows, given, public)
    assert computed is not None
    if computed.dtype == torch.float32:  # the sum of one row, and of none in all other groups
        wide = [computed, *(torch.zeros_like(computed) for _ in range(groups - 1))]
    else:
        wide = [computed] * groups
    sent = [protocol.narrowed(sums) for sums in wide]

    def combine(partials: Sequence[Tensor]) -> None:
        protocol.combine(public, protocol.added([sums.clone() for sums in partials]), None)

    measured = {}
    for name, partials in (("sent", sent), ("wide", wide)):
        measured[f"{name}_ms"] = least_ms(lambda partials=partials: combine(partials), repeats)  # type: ignore[misc]
        measured[f"{name}_mb"] = sum(sums.nbytes for sums in partials) / 1e6
    return measured


def main(
    as_json: JsonOption = False,
    quick: Annotated[bool, typer.Option("--quick", help="Few small rows, once.")] = False,
    vocabulary: Annotated[list[int], typer.Option(help="Repeatable.")] = [49152, 128256],  # noqa: B006
    sequences: Annotated[int, typer.Option(min=1)] = 64,
    rows: Annotated[int, typer.Option(min=2, help="Part rows of a sequence.")] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measures and prints the values of this module's description."""
    if quick:
        vocabulary, sequences, rows, repeats = [2000], 2, 2, 1
    timed: Sequence[Protocol] = (
        PMixed(rows, 1.0, RADIUS),
        Exponential(rows, rows, RADIUS),
        IndividualSettings(tokens=TOKENS).plan(rows),
    )
    result = {
        "bytes_a_token": {
            f"{name},{PARTS},{shards}": bytes_of(*asked, shards, vocabulary[0])
            for name, asked in ASKED.items()
            for shards in SHARDS
        },
        "adding": {
            f"{name},{groups}": adding(protocol, groups, sequences, vocabulary[0], repeats)
            for name, (protocol, _) in ASKED.items()
            for groups in SHARDS[1:]
        },
        "ms": {
            f"{protocol.name},{size}": times(protocol, sequences, rows, size, repeats)
            for size in vocabulary
            for protocol in timed
        },
        "threads": torch.get_num_threads(),
    }
    show(result, as_json)


if __name__ == "__main__":
    typer.run(main)
