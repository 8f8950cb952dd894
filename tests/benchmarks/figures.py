"""Says what pages show of measurements: each of `FIGURES` returns the text of a figure or a table from its records.

What follows from several figures is computed here, too, so that it can be told nowhere without them.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from privmix.training.expectation import TABLE as GAINS
from tests.benchmarks.record import MeasuredRecord

WIDTH = 120
USUAL = "one thread of a CPU"
"""The machine of records whose table names no other; their page says so."""
TOKENS = (1024, 16384, 131072)

DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
"""What pages call the databases, which records name by their scheme."""
NODE_EUR_AN_HOUR, NODE_TOKENS_A_SECOND = 2, 1000
"""The runbook's example: the price of a node, and what plain vLLM reaches on it."""


def titled(corpus: str) -> str:
    """Returns what the pages call a corpus, which records name by its file."""
    return {"shakespeare": "speeches", "mts_dialog_train": "dialogues"}.get(corpus, corpus)


record = cache(MeasuredRecord.read)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], below: str = "") -> str:
    """Returns a table on lines of its own, with a paragraph below it."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = "".join("\n|" + "".join(f" {cell} |" if cell != "" else " |" for cell in line) for line in lines)
    paragraph = textwrap.fill(below, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{text}\n\n{paragraph}\n" if below else f"{text}\n"


def source(name: str) -> str:
    """Says when and where a record was measured, and how to repeat it."""
    found = record(name)
    return f"Measured {found.date}, {found.machine}: `{found.command}`."


def where(*names: str) -> str:
    """Names records, whose commands repeat them, and says when and, if not on `USUAL`, where they were measured."""
    by_place: dict[str, list[str]] = {}
    for name in names:
        place = f"{record(name).date}, {record(name).machine}".removesuffix(f", {USUAL}")
        by_place.setdefault(place, []).append(f"`{name}`")
    return "; ".join(f"{', '.join(found)}: {place}" for place, found in by_place.items())


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the range of values."""
    return f"{format(min(values), form)} to {format(max(values), form)}"


# Speed


def _over_plain(name: str, streams: int = 8) -> float:
    """Returns a record's ratio to plain vLLM's tokens a second."""
    ratios: Mapping[str, float] = record(name).figures["private_over_plain"]
    (ratio,) = (ratio for cell, ratio in ratios.items() if cell.endswith(f",{streams}"))
    return ratio


def speed() -> str:
    """Compares with plain vLLM: whole answers over HTTP, and decoding alone by stage."""
    settings = {
        "pmixed": "`--protocol pmixed --parts 80`: one part a token",
        "exponential-16": "`--protocol exponential --parts 80 --sample 16`",
        "exponential": "`--protocol exponential --parts 64`: all parts",
        "individual": "`--protocol individual --parts 64`: all parts",
    }
    rows = [
        [text, *(_speed_cell(f"{kind}-{name}{late}") for kind in ("load", "step") for late in ("", "-late"))]
        for name, text in settings.items()
    ]
    columns = ["options", "`load`", "`load --layers 8`", "`step`", "`step --layers 8`"]
    return table(columns, rows, where("load-individual", "step-individual", "step-pmixed"))


def _speed_cell(name: str) -> str:
    try:
        figures = record(name).figures
    except FileNotFoundError:  # not measured
        return ""
    ((cell, ratio), *_) = figures["private_over_plain"].items()
    if stages := figures.get("stages_ms"):
        return f"{ratio:.3g}: {stages[cell]['shards']:.0f}, {stages[cell]['arithmetic']:.1f}"
    speed = figures["cells"].get(cell, {}).get("private", {}).get("tokens_per_s")
    return f"**{ratio:.2f}**" + (f": {speed:.1f}" if speed else "")


def decoded() -> str:
    """Says how many plain tokens one token costs after the first one."""
    names = {"PMixed": "load-pmixed", "individual budgets": "load-individual"}
    costs = {name: next(iter(record(each).figures["cells"].values())) for name, each in names.items()}
    return ", ".join(f"{cost['plain_tokens']['decoding']:.1f} with {name}" for name, cost in costs.items())


def _many_parts() -> str:
    """Compares tokens a second of 400 and of 80 parts."""
    cells = record("load-400-parts").figures["cells"]
    speeds = {cell: each["private"]["tokens_per_s"] for cell, each in cells.items()}
    return " and ".join(f"{speeds[f'pmixed,400,512,{n}'] / speeds[f'pmixed,80,512,{n}']:.2f}" for n in (8, 32))


def _host_ms() -> str:
    """Returns the range of the host's milliseconds of a step of 64 sequences."""
    times = [cell["host_ms"]["now"] for cell in record("sides").figures.values()]
    return f"{spread(times, '.1f')} ms"


def _start() -> str:
    figures = record("startup").figures
    return f"{figures['service_s']:.1f} s with {figures['parts']} parts"


def _corpora() -> str:
    figures = record("corpus").figures
    ours, theirs = (
        f"{figures[reader]['seconds']:.1f} s and {figures[reader]['peak_mb']:,.0f} MB"
        for reader in ("corpus", "pyarrow")
    )
    return f"{ours}, by pyarrow alone {theirs}"


def _adapters_gib() -> str:
    figures = [record(name).figures for name in ("parts", "parts-late")]
    return " and ".join(f"{each['adapters_gib']:.2f} GiB with {each['layers']} layers" for each in figures)


def other_speeds() -> str:
    """Lists figures of one line, with where they were measured."""
    rows = [
        ("the start of a service, until its first token", _start(), "startup"),
        ("2 GB of text in Parquet, read as a corpus", _corpora(), "corpus"),
        ("the host's time in a step of 64 sequences", _host_ms(), "sides"),
        ("the adapters of 1,000 parts", _adapters_gib(), "parts"),
        ("400 parts over 80 parts, tokens a second with 8 and 32 streams", _many_parts(), "load-400-parts"),
        ("requests with keys a second, SQLite and PostgreSQL", _keys("requests_per_s", ",.0f"), "keys"),
    ]
    return table(["measured", "figure", "record"], ((text, figure, where(name)) for text, figure, name in rows))


def _keys(figure: str, form: str) -> str:
    figures = record("keys").figures
    return " and ".join(format(figures[database][figure], form) for database in DATABASES)


def _node_tokens() -> float:
    """Returns the tokens a second of the example's node."""
    return NODE_TOKENS_A_SECOND * _over_plain("load-pmixed")


def _agreement(figure: str) -> str:
    """Compares a distance from float32 of logits in float32 with that of logits in bfloat16."""
    agreement = record("agreement").figures["families"]["agreement"]
    return f"{agreement['float32'][figure]:.3f} instead of {agreement['model'][figure]:.3f}"


# The reduction of rows


def reduced_bytes() -> str:
    """Shows the kB that leave the shards for a token, by the protocol and the number of shards."""
    figures = record("reduction").figures["bytes_a_token"]
    asked = {
        "pmixed": "one part: PMixed",
        "exponential": "16 parts: exponential",
        "individual": "all 80: individual budgets",
    }
    rows = []
    for protocol, text in asked.items():
        cells = {int(cell.split(",")[2]): each for cell, each in figures.items() if cell.startswith(protocol)}
        left = (each["held"] if shards == 1 else each["reduced"] for shards, each in cells.items())
        rows.append([text, *(_kb(size) for size in (cells[1]["raw"], *left))])
    return table(["asked", "raw rows", "1 shard", "2 shards", "8 shards"], rows, source("reduction"))


def _kb(size: int) -> str:
    return f"{size / 1000:,.0f}" if size >= 1000 else f"{size / 1000:g}"


def reduced_ms() -> str:
    """Shows the processor time from log-probabilities to weights."""
    figures = record("reduction").figures["ms"]
    sizes = list(dict.fromkeys(int(cell.split(",")[1]) for cell in figures))
    rows = [
        [protocol, *(f"{figures[f'{protocol},{size}'][kind]:,.0f}" for size in sizes for kind in ("raw", "reduced"))]
        for protocol in dict.fromkeys(cell.split(",")[0] for cell in figures)
    ]
    columns = [f"{size:,}: {kind}" for size in sizes for kind in ("raw rows", "reduced")]
    return table(["protocol, vocabulary", *columns], rows, source("reduction"))


def _adding(kind: str) -> str:
    """Returns the milliseconds of adding sums of two and of eight groups."""
    adding = record("reduction").figures["adding"]
    return " and ".join(f"{adding[f'exponential,{groups}'][kind]:.0f}" for groups in (2, 8))


# A GPU


MODELS = {"small": "small", "large": "8B", "quarter": "8B, quarter"}
"""The names of the models in the record of the GPU."""


def _gpu_cells() -> dict[tuple[str, int, int], Mapping[str, float]]:
    """Returns the ratios by model, context and parts drawn, of this engine."""
    ratios: Mapping[str, Mapping[str, float]] = record("gpu").figures["ratios"]
    cells = {}
    for name, each in ratios.items():
        model, context, parts = name.split(",")
        if model in MODELS:
            cells[model, int(context), int(parts)] = each
    return cells


def gpu() -> str:
    """Shows a step by model and context, and by the number of parts drawn."""
    figures, cells = record("gpu").figures, _gpu_cells()
    numbers = sorted({number for _, _, number in cells})
    rows = []
    for model, context in dict.fromkeys((model, context) for model, context, _ in cells):
        took = figures[model]["all"][f"ms,{context}"]
        ratios = {number: cells.get((model, context, number)) for number in numbers}
        floors = [
            f"{figures['floors'][f'{model},{context},{number}']['measured_over_floor']['rows']:.3g}"
            for number, ratio in ratios.items()
            if ratio
        ]
        private = [
            f"{took[str(number)]['rows']:.3g}: **{ratio['rows over plain']:.2f}**, {ratio['sampled over plain']:.2f}"
            if ratio
            else ""
            for number, ratio in ratios.items()
            if number
        ]
        rows.append([f"{MODELS[model]}, {context:,}", f"{took['0']['rows']:.3g}", *private, ", ".join(floors)])
    columns = ["model, context", "plain", *(f"m = {number}" for number in numbers[1:]), "over floor"]
    return table(columns, rows, where("gpu"))


def _gpu_of_vllm(parts: int) -> str:
    """Returns a sampled token of the small model over one of vLLM alone; without parts, its public row over it."""
    ratios = record("gpu").figures["ratios"][f"small,192,{parts}"]
    return f"{ratios['sampled over vLLM' if parts else 'rows over vLLM']:.2f}"


def _gpu_ratio(parts: int) -> str:
    found = [each["rows over plain"] for (_, _, number), each in _gpu_cells().items() if number == parts]
    return spread(found, ".1f")


def _gpu_graph(shape: str) -> str:
    """Returns the range of the milliseconds of a step's captured passes."""
    passes = [each["graph"] for each in record("gpu").figures[shape]["all"]["stages_ms"].values()]
    return f"{spread(passes, '.1f')} ms"


def _gpu_rates() -> str:
    rates = record("gpu").figures["rates"]["device"]
    return f"{rates['bytes'] / 1e12:.3g} TB/s and {rates['operations'] / 1e12:.0f} TFLOP/s"


# Quality of ensembles


def ensembles() -> str:
    """Shows the change of perplexity by the number of parts."""
    found = {name: record(f"compare-{name}").figures for name in ("speeches", "commits")}
    parts = {name: list(each["not_private"]) for name, each in found.items()}
    rows = [
        [cell, *(f"{found[name]['change'][cell][size][0]:.1f}" for name in found for size in parts[name])]
        for cell in found["speeches"]["change"]
    ]
    rows.append(
        ["not private", *(f"{found[name]['not_private'][size][0]:.1f}" for name in found for size in parts[name])]
    )
    columns = [f"{name}: {size}" for name in found for size in parts[name]]
    return table(["epsilon, tokens", *columns], rows, where("compare-speeches", "compare-commits"))


def _widest(*names: str) -> str:
    """Returns the widest half of an interval of a private row in records of changes of perplexity, in points."""
    rows = [row for name in names for row in record(name).figures["change"].values()]
    return f"{max((high - low) / 2 for row in rows for _, low, high in row.values()):.1f}"


def _compared(figure: str) -> str:
    """Returns a figure of the speeches and of the commits; the mean, if it has an interval."""
    found = (record(f"compare-{name}").figures[figure] for name in ("speeches", "commits"))
    return " and ".join(str(each[0] if isinstance(each, list) else each) for each in found)


def protocols() -> str:
    """Shows the change of perplexity by protocol, with 64 parts of the speeches."""
    found = record("compare-speeches").figures["protocols"]
    cells = ["2, 1,024", "8, 1,024", "8, 16,384"]
    return table(["protocol", *cells], ([name, *(f"{row[cell]:.1f}" for cell in cells)] for name, row in found.items()))


def budgets() -> str:
    """Shows the gains at equal budgets with 64 parts: the exponential mechanism, PMixed, individual budgets."""
    found = record("budgets").figures
    rows = [
        [f"{cells[0]['epsilon']:g}, {cells[0]['tokens']:,}", *map(_budget_cell, cells)]
        for cells in zip(*found.values(), strict=True)
        if cells[0]["parts"] == 64
    ]
    return table(["epsilon, tokens", *map(titled, found)], rows, where("budgets"))


def _budget_cell(cell: Mapping[str, Any]) -> str:
    exponential, pmixed, individual = (f"{cell['gain'][n][0]:.3f}" for n in ("exponential", "PMixed", "individual"))
    return f"{exponential}, {pmixed}, {f'**{individual}**' if _ahead(cell) else individual}"


def _ahead(cell: Mapping[str, Any]) -> bool:
    """Tells whether individual budgets are ahead outside the interval; the reported text said so in bold type alone."""
    return bool(cell["ahead"][1] > 0 if "ahead" in cell else cell["ahead_outside_the_interval"])


def budgets_ahead() -> str:
    """Counts the cells in which individual budgets are ahead of the exponential mechanism outside the interval."""
    cells = [cell for by_corpus in record("budgets").figures.values() for cell in by_corpus]
    return f"{sum(map(_ahead, cells))} of {len(cells)}"


def budgets_ratio() -> str:
    return spread([cell["ratio"] for by_corpus in record("budgets").figures.values() for cell in by_corpus])


def fading() -> str:
    """Returns the range of what the shorter horizon gains of the longer one's gain in the last window."""
    lasts = [
        {method: gains[-1] for method, gains in methods.items()}
        for methods in record("fading").figures["gain_by_window"].values()
    ]
    short = [each["individual, horizon 1024"] / each["individual, horizon 16384"] for each in lasts]
    return spread(short)


# A private base


BASES = {
    "mts_dialog_train": "private_base-dialogues",
    "commits": "private_base-commits",
    "shakespeare": "private_base-speeches",
    "demo": "private_base-demo",
}
"""The records of the corpora on which private bases are measured."""


def base_rows(corpus: str) -> Mapping[str, Any]:
    """Returns the rows that were measured on this corpus, by epsilon."""
    rows: Mapping[str, Any] = record(BASES[corpus]).figures["corpora"][corpus]
    return rows


def _base_cell(corpus: str, epsilon: str, method: str, tokens: int, based: bool) -> Mapping[str, Any]:
    """Returns one method's row, on a private base or not. DP-SGD is that with all of epsilon, for any tokens.

    Where the rule leaves nothing to an ensemble, the row on a base is DP-SGD's.
    """
    rows = base_rows(corpus)[epsilon]
    trained = next(row for row in rows if (row["method"], row["base_epsilon"]) == ("DP-SGD", float(epsilon)))
    if method == "DP-SGD":
        return trained
    found = (
        row
        for row in rows
        if (row["method"], row["tokens"], row["base_epsilon"] is not None) == (method, tokens, based)
    )
    return next(found, {**trained, "over_dp_sgd": None})


def base_gain(corpus: str, epsilon: str, method: str, tokens: int, based: bool) -> tuple[float, float, float]:
    """Returns the gain of one method, on a private base or not, in nats a token, and the ends of its interval."""
    mean, low, high = _base_cell(corpus, epsilon, method, tokens, based)["gain"]
    return mean, low, high


def private_base() -> str:
    """Shows individual budgets, alone and on a private base, beside DP-SGD with all of epsilon."""
    rows = []
    for corpus in BASES:
        for epsilon in sorted(base_rows(corpus), key=float, reverse=True):
            trained, *_ = base_gain(corpus, epsilon, "DP-SGD", TOKENS[0], False)
            alone = (base_gain(corpus, epsilon, "individual", tokens, False) for tokens in TOKENS)
            based = (_base_cell(corpus, epsilon, "individual", tokens, True) for tokens in TOKENS)
            name = f"{titled(corpus)}, {epsilon}"
            gains = ", ".join(f"{mean:.3f}" for mean, _, _ in alone)
            rows.append([name, f"{trained:.3f}", gains, _base_epsilon(corpus, epsilon), *map(_beside_dp_sgd, based)])
    beside = (f"on it: {tokens:,}" for tokens in TOKENS)
    columns = ["corpus, epsilon", "DP-SGD", "ensemble alone", "base's epsilon", *beside]
    return table(columns, rows, where(*BASES.values()))


def _base_epsilon(corpus: str, epsilon: str) -> str:
    """Returns the epsilon of the base on which ensembles stand: one, as the records are made."""
    rows = base_rows(corpus)[epsilon]
    (found,) = {row["base_epsilon"] for row in rows if row["tokens"] is not None} - {None}
    return f"{found:g}"


def _beside_dp_sgd(row: Mapping[str, Any]) -> str:
    if row["over_dp_sgd"] is None:
        return "DP-SGD alone"
    return _between(row["over_dp_sgd"], "+.3f")


def _between(found: Sequence[float], form: str = ".3f") -> str:
    """Returns a mean with its interval."""
    mean, low, high = found
    return f"{mean:{form}} ({low:.3f} to {high:.3f})"


def _verdict(corpus: str, epsilon: str) -> str:
    """Says for how many tokens the ensemble on a base is ahead of DP-SGD outside the interval, level, or behind."""
    found: dict[str, list[str]] = {"ahead": [], "level": [], "behind": [], "DP-SGD itself": []}
    for tokens in TOKENS:
        found[_place(_base_cell(corpus, epsilon, "individual", tokens, True)["over_dp_sgd"])].append(f"{tokens:,}")
    said = [f"{word} for {' and '.join(filter(None, (', '.join(n[:-1]), n[-1])))}" for word, n in found.items() if n]
    return ", ".join(said) + " tokens"


def _place(over_dp_sgd: tuple[float, float, float] | None) -> str:
    if over_dp_sgd is None:
        return "DP-SGD itself"
    _, low, high = over_dp_sgd
    return "ahead" if low > 0 else "behind" if high < 0 else "level"


def base_contexts() -> str:
    """Shows the gains on the dialogues by the number of tokens before the position, for 1,024 private tokens."""
    corpus = "mts_dialog_train"
    ways = {"DP-SGD": ("DP-SGD", False), "ensemble alone": ("individual", False), "on a base": ("individual", True)}
    epsilons = sorted(base_rows(corpus), key=float, reverse=True)
    gains = {
        f"{epsilon}, {name}": _base_cell(corpus, epsilon, method, TOKENS[0], based)["contexts"]
        for epsilon, (name, (method, based)) in product(epsilons, ways.items())
    }
    ranges, *_ = gains.values()
    rows = [[name, *(f"{gain:.3f}" for gain in contexts.values())] for name, contexts in gains.items()]
    return table(["epsilon", *ranges], rows, where(BASES[corpus]))


# Training


def layers() -> str:
    """Shows what readers of the last layers keep of the gain of all layers, each at its best rate with rank 4."""
    cells = [(tokens, corpus) for tokens in (2000, 12000) for corpus in ("speeches", "commits")]
    names = [f"layers-{corpus}-{tokens}" for tokens, corpus in cells]
    kept = list(map(_kept_by_layers, names))
    rows = [
        [number, *(f"{each[number]:.2f}" if number in each else "" for each in kept)]
        for number in sorted(kept[0], reverse=True)
    ]
    columns = [f"{tokens:,} tokens: {corpus}" for tokens, corpus in cells]
    return table(["last layers", *columns], rows, where(*names))


def _kept_by_layers(name: str) -> dict[int, float]:
    best: dict[int, float] = {}
    for recipe, row in record(name).figures.items():
        if found := re.search(r"(\d+) layers, rank 4,", recipe):
            number = int(found[1])
            best[number] = max(best.get(number, 0.0), row["gain"])
    return {number: gain / best[max(best)] for number, gain in best.items()}


def _adapters(recipe: str) -> str:
    """Returns the gains of a recipe, with parts of 12,000 tokens of the speeches and of the commits."""
    found = (record(f"adapters-{corpus}-12000").figures for corpus in ("speeches", "commits"))
    return ", ".join(f"{each[recipe]['gain']:.3f}" for each in found)


def plain_lora() -> str:
    """Compares the gains of plain LoRA with those of readers of all layers."""
    return f"{_adapters('plain, rate 5e-4')} against {_adapters('reader, rate 5e-4')}"


def trainings() -> str:
    """Shows how fast parts are trained."""
    kinds = record("train").figures["kinds"]
    rows = [
        [kind, *(f"{each['adapters_per_hour'][kind]:.0f}" for each in kinds.values())]
        for kind in kinds["speeches"]["adapters_per_hour"]
    ]
    return table(["adapters an hour of a core", *kinds], rows, where("train"))


def beside_opacus() -> str:
    """Returns the ratios of users a second over Opacus' hooks, by the tokens of a user."""
    ratios = record("train-dp_sgd").figures["dp_sgd"]
    return " and ".join(f"{each['ratio']:.2f}" for each in ratios.values())


def users_a_second() -> str:
    speeds = record("train").figures["dp_sgd"]
    return ", ".join(f"{each['privmix']:.2g} of {tokens} tokens" for tokens, each in speeds.items())


def dp_sgd() -> str:
    """Shows the gain of DP-SGD by its rate and steps."""
    names = ("dp_sgd-commits-8", "dp_sgd-speeches-8", "dp_sgd-speeches-2")
    found = {name.removeprefix("dp_sgd-").replace("-", ", "): record(name).figures for name in names}
    recipes = dict.fromkeys(recipe for each in found.values() for recipe in each)
    rows = [
        [recipe, *(f"{each[recipe]['gain']:.3f}" if recipe in each else "" for each in found.values())]
        for recipe in recipes
    ]
    return table(["recipe", *found], rows, where(*names))


def text_parts() -> str:
    """Shows the change of perplexity with texts as parts."""
    figures = record("evaluate-texts").figures
    changes = {**figures["change"], "not private": figures["not_private"]}
    rows = [[cell, *(f"{mean:.1f}" for mean, _, _ in row.values())] for cell, row in changes.items()]
    columns = [f"{size} texts" for size in figures["not_private"]]
    return table(["epsilon, tokens", *columns], rows, where("evaluate-texts"))


def _texts(kind: str) -> str:
    """Returns the gains of a text of 1,024 tokens, as a part ("row") or in the prompt."""
    return " and ".join(f"{record(f'texts-{corpus}').figures['1024'][kind]:.2f}" for corpus in ("speeches", "commits"))


# Expectations, and the papers' settings


def _gains() -> Mapping[str, Mapping[str, Any]]:
    kinds: Mapping[str, Mapping[str, Any]] = json.loads(GAINS.read_bytes())["part_kind"]
    return kinds


def part_gains() -> str:
    """Shows what a part gains by the tokens of its text."""
    rows = [
        [
            {"reader": "adapter"}.get(kind, kind),
            f"{int(size):,}",
            *(spread(each["gain_by_part_tokens"][size]) for each in by),
        ]
        for kind, by in ((kind, list(each["corpora"].values())) for kind, each in _gains().items())
        for size in by[0]["gain_by_part_tokens"]
    ]
    names = next(iter(_gains().values()))["corpora"]
    when = f"Measured {json.loads(GAINS.read_bytes())['measured']}, one thread of a CPU."
    return table(["part", "tokens", *map(titled, names)], rows, when)


def _kept(protocol: str) -> str:
    """Returns the range of the fraction of the gain that a protocol keeps at a radius of 0.4, over all texts."""
    corpora = [by for each in _gains().values() for by in each["corpora"].values()]
    fractions = [100 * fraction for by in corpora for fraction in by["kept"][protocol]["0.4"]]
    return f"{spread(fractions, '.0f')} %"


def published() -> str:
    """Shows what the papers' settings guarantee."""
    rows = [
        [f"{case['parts']}, {case['q']:g}, {case['tokens']:,}"]
        + [f"{case[name]:.3g}" for name in ("claimed", "worst_known", "certified", "certified_worst_known")]
        for case in record("published").figures["cases"]
    ]
    columns = ["parts, q, tokens", "claimed", "worst known pair", "certified: claimed", "certified: worst pair"]
    return table(columns, rows)


# Structures and the ledger


def schema_ms() -> str:
    """Lists what a new schema costs a processor."""
    stages = record("first_token").figures["stages_ms"]
    translate, compile_, start = (f"{stages[stage]:.0f}" for stage in ("translate", "compile", "start"))
    return (
        f"{translate} ms to translate it, {compile_} to compile it, {start} to find its start and end, and "
        f"{stages['position']:.1f} for each sampled token"
    )


def first_token_ratios() -> str:
    """Compares the time to the first token with a new schema to that without, by the length of the prompt."""
    figures = record("first_token").figures
    return " and ".join(f"{figures[f'prompt of {tokens}']['new_over_none']:.2f}" for tokens in (64, 512))


def schemas_kept() -> str:
    """Compares what readers keep for a schema of ours that they accept."""
    kept = record("schemas").figures["kept_kb"]
    return f"{kept['privmix']} kB, {kept['library']} by the library's own reading, and {kept['xgrammar']} with xgrammar"


def verified() -> str:
    """Says how long the verification of a ledger takes."""
    found = record("ledger").figures
    seconds = [f"{found[kind]['verify_all_s']:.1f} s in {name}" for kind, name in DATABASES.items()]
    return f"{' and '.join(seconds)} for {found['sqlite']['rows']:,} rows"


def neighbours() -> str:
    """Tables what one key does to another's requests."""
    rows = [
        [
            name,
            f"**{way['ratio']:.3g}**",
            f"{way['p50']:.3g}",
            f"{way['alone_s']:.2f}, {way['beside_s']:.2f}",
            ", ".join(f"{number:,} of {status}" for status, number in way["statuses"].items()),
        ]
        for name, way in record("neighbours").figures["ways"].items()
    ]
    return table(["way", "p99", "p50", "p99 alone, beside, s", "answers to the other key"], rows, where("neighbours"))


def charged() -> str:
    """Lists the tokens a second that leases of 32 grant to one holder and to 32."""
    found, speeds = record("ledger").figures, []
    for kind, name in DATABASES.items():
        one, many = (found[kind]["tokens_per_s"][f"leases of 32, {holders} holders"] for holders in (1, 32))
        speeds.append(f"{one:,} and {many:,} in {name}")
    return ", ".join(speeds)


FIGURES: Mapping[str, Callable[[], str]] = {
    **{
        function.__name__: function
        for function in (
            *(speed, decoded, other_speeds, reduced_bytes, reduced_ms, gpu),
            *(ensembles, protocols, budgets, budgets_ahead, budgets_ratio, fading, private_base),
            base_contexts,
            *(layers, trainings, plain_lora, dp_sgd, beside_opacus, users_a_second),
            *(schema_ms, first_token_ratios, schemas_kept, verified, charged, neighbours),
            *(text_parts, part_gains, published),
        )
    },
    **{
        f"base_{titled(corpus)}_{epsilon}": partial(_verdict, corpus, epsilon)
        for corpus, epsilon in product(("mts_dialog_train", "commits"), ("8", "2"))
    },
    "adding_sent": lambda: _adding("sent_ms"),
    "adding_wide": lambda: _adding("wide_ms"),
    "gpu_one": lambda: _gpu_ratio(1),
    "gpu_sixteen": lambda: _gpu_ratio(16),
    "gpu_rates": _gpu_rates,
    "gpu_vllm": lambda: ", ".join(map(_gpu_of_vllm, (0, 1, 16, 64))),
    "gpu_graph_small": lambda: _gpu_graph("small"),
    "gpu_graph_large": lambda: _gpu_graph("large"),
    "kept_pmixed": lambda: _kept("pmixed"),
    "kept_exponential": lambda: _kept("exponential"),
    "kept_individual": lambda: _kept("individual"),
    "key_ms": lambda: _keys("cpu_ms_per_request", ".2f"),
    "key_requests": lambda: _keys("requests_per_s", ",.0f"),
    "key_statements": lambda: _keys("statements_per_request", ".1f"),
    "key_transactions": lambda: f"{record('keys').figures['sqlite']['transactions_per_request']:.2f}",
    "node_price": lambda: f"{NODE_EUR_AN_HOUR}",
    "node_plain_tokens": lambda: f"{NODE_TOKENS_A_SECOND:,}",
    "node_tokens": lambda: f"{_node_tokens():,.0f}",
    "node_eur": lambda: f"{1e6 * NODE_EUR_AN_HOUR / (3600 * _node_tokens()):.2f}",
    "rounding_of_rows": lambda: _agreement("mean"),
    "rounding_of_ratios": lambda: _agreement("ratio"),
    "widest": lambda: _widest("compare-speeches", "compare-commits"),
    "text_widest": lambda: _widest("evaluate-texts"),
    "text_perplexity": lambda: f"{record('evaluate-texts').figures['perplexity']}",
    "hot": lambda: _adapters("reader"),
    "warmed_up": lambda: _adapters("reader, rate 1e-3, warm-up over a tenth of the steps"),
    "text_rows": lambda: _texts("row"),
    "text_prompts": lambda: _texts("prompt"),
    "load_8": lambda: f"{_over_plain('load-pmixed'):.2f}",
    "load_32": lambda: f"{_over_plain('load-pmixed', 32):.2f}",
    "step_8": lambda: f"{_over_plain('step-pmixed'):.2f}",
    "structured_step": lambda: f"{record('first_token').figures['step_over_none']:.2f}",
    "structured_position": lambda: f"{record('first_token').figures['position_of_step']:.3f}",
    "perplexities": lambda: _compared("perplexity"),
    "fine_tuned": lambda: _compared("fine_tuned"),
}
"""By the names in the pages' marks."""
