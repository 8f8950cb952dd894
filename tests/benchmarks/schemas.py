"""Measures structured answers over a folder of JSON Schemas: `python -m tests.benchmarks.schemas FOLDER --json`.

FOLDER has files of the form of JSON Schema's own test suite, lists of `{"schema": ..., "tests": [{"data": ..., "valid":
...}]}`, or of maskbench, one such object; without FOLDER, the small schemas beside this file. No model is needed: texts
are drawn from the legal tokens of the tests' tokenizer, with a preference for those that end something. For `privmix`,
and for `library`, llguidance's own reading of the same schemas:

- `schemas`, `refused`: how many schemas there are, and how many were refused, `by_reason`.
- `texts`, `invalid_texts`: texts drawn, and those that are no value of their schema as the `jsonschema` package, which
  shares no code with either side, reads it. Instances that are not valid count too, if they are admitted.
- `dead_ends`: texts after which no token is legal although they are not complete.
- `unjudged`: texts of which the package cannot tell, for instance because Python lacks an expression.
- `cut`: texts that were no longer followed after `--tokens` tokens.
- `answers`, `left_broken`: answers of at most a few tokens more than the shortest one has, which are ended as a
  coordinator ends them, and those that are no value of their schema. Only privmix ends answers.
- `valid`, `not_admitted`: valid instances of accepted schemas, and those whose text is not admitted, with the
  properties in the order of the schema.
- `unnamed`: those of them that have properties which the schema names nowhere; privmix closes objects.
- `compile_ms`: the median and the greatest time until a schema can be followed; `mask_us`: the median time of a mask.
- `by_keyword`: the same counts, where one is not 0, for the schemas that use a keyword.

- `kept_kb`, with `--memory`: what a process of its own grows by for each schema that it can follow and keeps, of which
  it has computed the first mask; for xgrammar, too.

`vllm` counts the schemas that vLLM's own validation with xgrammar refuses, and those that one of both refuses alone.
"""

import json
import multiprocessing
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import numpy as np
import psutil
import typer
from llguidance import LLMatcher
from referencing.exceptions import Unresolvable
from transformers import AutoTokenizer

from privmix.structure import grammar
from privmix.structure.compiler import begun, limits_of
from privmix.structure.errors import StructureError
from privmix.structure.matcher import Matcher
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import show
from tests.support.structure import vocabulary

OWN = Path(__file__).parent / "schemas.json"
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COUNTS = (
    "schemas",
    "refused",
    "texts",
    "invalid_texts",
    "dead_ends",
    "cut",
    "answers",
    "left_broken",
    "unjudged",
    "valid",
    "unnamed",
    "not_admitted",
)
WRONG = ("invalid_texts", "dead_ends", "left_broken", "not_admitted", "wrongly_empty")
SPARE = 30
"""The greatest number of tokens that an answer may have beside those of the shortest one."""
COPIES = 20
"""How many of each schema are kept where memory is measured."""
_ENDING = ('"', "}", "]", '"}', '"]', "}}", "]}", '",', ",", "0", "1")


PropertyOrders = list[dict[str, int]]
"""The places of the names that each object schema mentions."""


@dataclass(frozen=True)
class SchemaCase:
    """A schema with instances."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


@dataclass
class Side:
    """What was counted for one reader of schemas."""

    counts: Counter[str] = field(default_factory=Counter)
    keywords: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)
    grammar_bytes: list[int] = field(default_factory=list)

    def count(self, case: SchemaCase, what: str, example: str = "") -> None:
        self.counts[what] += 1
        for keyword in keywords(case.schema):
            self.keywords.setdefault(keyword, Counter())[what] += 1
        if what in WRONG and len(self.examples) < 200:
            self.examples.append(f"{what} {case.name}: {example[:300]}")

    def summary(self) -> dict[str, Any]:
        return {
            **{count: self.counts[count] for count in COUNTS},
            "compile_ms": {
                "median": round(statistics.median(self.compile_ms or [0]), 2),
                "most": round(max(self.compile_ms or [0]), 1),
            },
            "grammar_bytes": round(statistics.median(self.grammar_bytes or [0])),
            "mask_us": round(statistics.median(self.mask_us or [0]), 1),
            "by_reason": dict(self.reasons.most_common()),
            "by_keyword": {
                keyword: dict(found)
                for keyword, found in sorted(self.keywords.items())
                if any(found[bad] for bad in ("refused", *WRONG))
            },
        }


def main(
    folder: Annotated[Path | None, typer.Argument(help="Schemas with instances; by default some of our own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take this number of schemas, at random.")] = None,
    draws: Annotated[int, typer.Option(min=0, help="Texts of each schema.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="The longest text.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Compare with vLLM's validation, which takes long to start.")
    ] = False,
    library: Annotated[bool, typer.Option(help="Compare with the library's own reading.")] = True,
    memory: Annotated[bool, typer.Option("--memory", help="Measure what kept schemas take, also of xgrammar.")] = False,
    examples: Annotated[bool, typer.Option("--examples", help="Print what was wrong, in full.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Ten schemas.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count refused schemas, invalid texts, dead ends and valid instances that are not admitted."""
    found = list(cases(folder or OWN))
    limit = 10 if quick else limit
    if limit is not None and limit < len(found):
        found = random.Random(seed).sample(found, limit)
    makers: dict[str, Callable[[Any], str]] = {"privmix": grammar.of_json_schema}
    if library:
        makers["library"] = of_library
    vocabulary()
    sides = {name: Side() for name in makers}
    for case in found:
        for name, make in makers.items():
            chance = random.Random(f"{seed} {case.name}")
            measure(case, make, sides[name], draws, tokens, chance, ends=name == "privmix")
    measured: dict[str, Any] = {name: side.summary() for name, side in sides.items()}
    if memory:
        measured["kept_kb"] = {name: kept_kb(name, [case.schema for case in found]) for name in FOLLOWERS}
    if vllm:
        refused = {case.name for case in found if not vllm_accepts(case.schema)}
        measured["vllm"] = {
            "refused": len(refused),
            "refused_alone": len(refused - sides["privmix"].refused),
            "privmix_refused_alone": len(sides["privmix"].refused - refused),
        }
    if examples:
        measured["examples"] = {name: side.examples for name, side in sides.items()}
    show(measured, as_json)


def cases(source: Path) -> Iterator[SchemaCase]:
    """Yields the schemas of a file or of a folder."""
    files = sorted(source.rglob("*.json")) if source.is_dir() else [source]
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        for index, group in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(group, dict) and "schema" in group:
                instances = [(test["data"], test["valid"]) for test in group.get("tests", []) if "data" in test]
                yield SchemaCase(f"{file.relative_to(source.parent)}[{index}]", group["schema"], instances)


def of_library(schema: Any) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return str(LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": ONE_LINE}, ensure_ascii=False)))


def kept_kb(reader: str, schemas: list[Any]) -> float:
    """Returns the kilobytes that one reader keeps for each schema that it accepts."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_kept_kb, reader, schemas).result()


def _kept_kb(reader: str, schemas: list[Any]) -> float:
    follow, kept, sizes = FOLLOWERS[reader](), [], []
    for _ in range(1 + COPIES):  # what the first ones take is mostly what was free after their reading
        for schema in schemas:
            with suppress(ValueError, RuntimeError, StructureError):  # it is refused
                kept.append(follow(schema))
        sizes.append(psutil.Process().memory_info().rss)
    return round((sizes[-1] - sizes[0]) / 1024 / (len(kept) * COPIES / len(sizes)))


def _llguidance(make: Callable[[Any], str]) -> Callable[[Any], object]:
    vocabulary()

    def follow(schema: Any) -> object:
        engine = engine_of(make(schema))
        if engine.is_error():
            raise StructureError(engine.get_error())
        engine.compute_bitmask()
        return engine

    return follow


def _xgrammar() -> Callable[[Any], object]:
    import xgrammar  # it imports torch

    tokenizer = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(resolve()))
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)

    def follow(schema: Any) -> object:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        matcher.fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size))
        return matcher

    return follow


FOLLOWERS: dict[str, Callable[[], Callable[[Any], object]]] = {
    "privmix": lambda: _llguidance(grammar.of_json_schema),
    "library": lambda: _llguidance(of_library),
    "xgrammar": _xgrammar,
}
"""Makes what returns an object that follows a schema, by the reader."""


def vllm_accepts(schema: Any) -> bool:
    """Tells whether vLLM's validation with xgrammar accepts a schema."""
    import xgrammar  # vLLM takes long to import
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    try:
        if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
            return False
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except Exception:  # what the library raises is a refusal
        return False
    return True


def measure(
    case: SchemaCase,
    make: Callable[[Any], str],
    side: Side,
    draws: int,
    tokens: int,
    chance: random.Random,
    *,
    ends: bool = False,
) -> None:
    """Counts what one reader makes of a schema.

    Args:
        ends: end answers as a coordinator does, too.
    """
    side.count(case, "schemas")
    start = time.perf_counter()
    try:
        text = make(case.schema)
        engine = engine_of(text)
        reason = engine.get_error() if engine.is_error() else None
        compile_ms = (time.perf_counter() - start) * 1e3
        follower = begun(text, vocabulary())[0] if ends and reason is None else None
    except StructureError as error:
        reason = str(error)
    except ValueError:
        reason = "the library raised an error"
    if reason is not None:
        side.count(case, "refused")
        side.refused.add(case.name)
        side.reasons[reason.split("\n")[0][:160]] += 1
        return
    side.grammar_bytes.append(len(text))
    side.compile_ms.append(compile_ms)
    order = order_of(case.schema)
    for value, valid in case.instances:
        admitted = admits(engine_of(text), value, order)
        if valid:
            side.count(case, "valid")
            if not admitted:
                side.count(
                    case,
                    "unnamed" if unnamed(value, order[0]) else "not_admitted",
                    json.dumps(value, ensure_ascii=False),
                )
        elif admitted and is_valid(case.schema, json.dumps(value)) is False:
            side.count(case, "invalid_texts", json.dumps(value, ensure_ascii=False))
    for _ in range(draws):
        drawn, complete = draw(engine_of(text), tokens, chance, side.mask_us)
        side.count(case, "texts")
        if complete is None:
            side.count(case, "cut")
        elif not complete:
            side.count(case, "dead_ends", drawn)
        else:
            verdict = is_valid(case.schema, drawn)
            if not verdict:
                side.count(case, "unjudged" if verdict is None else "invalid_texts", drawn)
    for _ in range(draws if follower else 0):
        assert follower is not None
        side.count(case, "answers")
        ended = answer(follower, chance)
        if ended is None or is_valid(case.schema, ended) is False:
            side.count(case, "left_broken", repr(ended))


def engine_of(text: str) -> LLMatcher:
    return LLMatcher(vocabulary().tokenizer, text, log_level=0, limits=limits_of(text))


def admits(engine: LLMatcher, value: Any, order: PropertyOrders) -> bool:
    """Tells whether the text of a value can be followed to its end."""
    tokens = vocabulary().tokenizer.tokenize_str(json.dumps(ordered(value, order), ensure_ascii=False))
    for begin in range(0, len(tokens), 32):
        piece = tokens[begin : begin + 32]
        if not engine.consume_tokens(piece):
            return False
        if begin + 32 < len(tokens):
            engine.compute_bitmask()
    return bool(engine.is_accepting())


def unnamed(value: Any, names: Mapping[str, int]) -> bool:
    """Tells whether a value has a property that its schema names nowhere."""
    if isinstance(value, dict):
        return bool(value.keys() - names) or any(unnamed(inner, names) for inner in value.values())
    return isinstance(value, list) and any(unnamed(inner, names) for inner in value)


def order_of(schema: Any) -> PropertyOrders:
    """Returns the orders of the properties that a schema names, together and object by object."""
    found: PropertyOrders = [{}]
    waiting = [schema]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, dict):
            named = [*node["properties"]] if isinstance(node.get("properties"), dict) else []
            named += node["required"] if isinstance(node.get("required"), list) else []
            names = list(dict.fromkeys(map(str, named)))
            found.append({name: place for place, name in enumerate(names)})
            for name in names:
                found[0].setdefault(name, len(found[0]))
            waiting = [*node.values(), *waiting]
        elif isinstance(node, list):
            waiting = [*node, *waiting]
    return found


def ordered(value: Any, orders: PropertyOrders) -> Any:
    """Returns a value whose properties are in the order of the schema that names most of them."""
    if isinstance(value, dict):
        best = max(orders[1:], key=lambda order: len(order.keys() & value.keys()), default={})
        places = {name: (0, best[name]) if name in best else (1, orders[0].get(name, len(orders[0]))) for name in value}
        return {name: ordered(value[name], orders) for name in sorted(value, key=lambda name: places[name])}
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e17:
        return int(value)
    return [ordered(inner, orders) for inner in value] if isinstance(value, list) else value


def draw(engine: LLMatcher, tokens: int, chance: random.Random, mask_us: list[float]) -> tuple[str, bool | None]:
    """Draws a text. Returns it and whether it is complete; None if it has more tokens than this."""
    words = vocabulary()
    last, ending = _token_kinds()
    drawn: list[int] = []
    while len(drawn) < tokens:
        if engine.is_stopped():
            break
        start = time.perf_counter()
        mask = engine.compute_bitmask()
        mask_us.append((time.perf_counter() - start) * 1e6)
        legal = _unpacked(mask) & ~last
        if engine.is_accepting() and (not legal.any() or chance.random() < 0.3):
            break
        if engine.is_error() or not legal.any():
            return words.tokenizer.decode_str(drawn), False
        preferred = legal & ending
        likely = preferred if preferred.any() and chance.random() < min(0.9, 0.3 + len(drawn) / 100) else legal
        token = int(chance.choice(np.flatnonzero(likely)))
        if not engine.consume_token(token):
            return words.tokenizer.decode_str(drawn), False
        drawn.append(token)
    else:
        return words.tokenizer.decode_str(drawn), None
    return words.tokenizer.decode_str(drawn), bool(engine.is_accepting() and not engine.is_error())


def answer(follower: Matcher, chance: random.Random, spare: int = SPARE) -> str | None:
    """Draws an answer of few tokens, which is ended while its known end fits; None if it has none or cannot go on."""
    decode = vocabulary().tokenizer.decode_str
    text: tuple[int, ...] = ()
    try:
        position = follower.after(text)
        room = (position.shortest or 0) + chance.randint(0, spare)
        while not position.complete:
            text += position.forced
            if position.end is None:
                return None
            if len(text) + len(position.end) >= room:
                return decode([*text, *position.end])
            token = _chosen(position.legal, chance)
            if vocabulary().ends >> token & 1:
                return decode(list(text))
            following = follower.after((*text, token), room - len(text) - 1)
            if following.shortest is None or len(text) + 1 + following.shortest > room:
                return decode([*text, *position.end])
            text, position = (*text, token), following
    except StructureError:
        return None
    return decode([*text, *position.forced])


def _chosen(legal: bytes, chance: random.Random) -> int:
    """Chooses a token; every other time one that ends something, if there is one."""
    tokens = _unpacked(legal)
    preferred = tokens & _token_kinds()[1]
    return int(chance.choice(np.flatnonzero(preferred if preferred.any() and chance.random() < 0.5 else tokens)))


def _unpacked(mask: bytes) -> np.ndarray[Any, Any]:
    """Returns whether each token of the vocabulary is legal."""
    size = vocabulary().tokenizer.vocab_size
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=size, bitorder="little").astype(bool)


@cache
def _token_kinds() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns whether each token ends a completion, and whether it ends something within one."""
    words = vocabulary()
    tokens = range(words.tokenizer.vocab_size)
    last = np.array([bool(words.ends >> token & 1) for token in tokens])
    return last, np.array([words.tokenizer.decode_str([token]).strip() in _ENDING for token in tokens])


def is_valid(schema: Any, text: str) -> bool | None:
    """Tells whether a text is JSON without infinite numbers, and a value of a schema; None if the judge cannot tell."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    if "Infinity" in json.dumps(value, ensure_ascii=False).replace('"Infinity', ""):
        return False
    try:
        return bool(validator(schema).is_valid(value))
    except (re.error, Unresolvable, RecursionError):  # what Python lacks, another document, a circle of references
        return None
    except BaseException as error:  # its maps, which are of Rust, panic where Python would raise a RecursionError
        if type(error).__name__ != "PanicException":
            raise
        return None


def validator(schema: Any) -> Any:
    return _validator(json.dumps(schema))


@lru_cache(maxsize=4)  # it takes longer to make one than to judge a text
def _validator(text: str) -> Any:
    schema = json.loads(text)
    base = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return jsonschema.validators.extend(base, {"multipleOf": _multiple_of})(schema, format_checker=FORMATS)


def _multiple_of(_: Any, step: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Replaces the package's check, which divides floats: 0.07 is a multiple of 0.01."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (Fraction(Decimal(str(value))) / Fraction(Decimal(str(step)))).denominator != 1:
        yield jsonschema.ValidationError("is not a multiple")


FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "uuid", "email"])


@FORMATS.checks("date-time", raises=ValueError)  # type: ignore[untyped-decorator]
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(value).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)  # type: ignore[untyped-decorator]
def _time(value: object) -> bool:
    return not isinstance(value, str) or datetime.fromisoformat(f"2024-01-01T{value}").tzinfo is not None


def keywords(schema: Any) -> set[str]:
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            known = {name for name in node if name in KNOWN}
            found |= known
            waiting += [inner for name, inner in node.items() if name not in ("enum", "const", "properties", "$defs")]
            for name in ("properties", "$defs"):
                waiting += node[name].values() if isinstance(node.get(name), dict) else []
        elif isinstance(node, list):
            waiting += node
    return found


KNOWN = frozenset(
    [
        "type",
        "enum",
        "const",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "properties",
        "required",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$dynamicRef",
        "$id",
        "$anchor",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
)


if __name__ == "__main__":
    typer.run(main)
