"""Writes the grammar of the JSON texts of a schema, in the Lark format of llguidance.

Each text is the one that `json.dumps(value, ensure_ascii=False)` writes, but for the forms of numbers: one line, with
one space after `:` and `,`. Properties come in the order of the schema. An object that names properties, also by
patterns, has no others, unless the schema says so: clients name the properties that they want, and a model that may add
some seldom ends an object. xgrammar, vLLM's default engine, reads schemas in the same way.

The engine reads a text as terminals, and never takes a character back. So all alternatives share the terminals of JSON:
a bracket, a comma, a string, a number.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from llguidance import LLMatcher

from privmix.structure import patterns
from privmix.structure.ending import EndFinder
from privmix.structure.errors import StructureError
from privmix.structure.numbers import (
    DIGITS,
    SAFE_DIGITS,
    Numbers,
    common_step,
    fraction_step,
    places,
    terminals,
)
from privmix.structure.schemas import Schemas
from privmix.structure.shapes import Array, Contained, JsonShape, Node, Object, Text, canonical, joined
from privmix.structure.vocabulary import BYTES

MAX_RULES = 60_000
MAX_UNIQUE = 64
"""The maximum number of values of which an array with different items is made: the bits of a rule's parameter."""
MAX_STATES = 1000
"""The maximum number of states in which an object or an array counts what it has."""
MAX_PATTERNS = 4
"""The maximum number of patterns of names of one object."""
MAX_STEP_DIGITS = 15
MAX_MADE_NAMES = 16
"""The maximum number of properties without a name in the schema that an object must have."""

_ZERO = Decimal(0)

COMMA, COLON = '", "', '": "'


class Repeated(NamedTuple):
    """A rule, after a separator, from `least` to `most` times."""

    rule: int
    least: int
    most: int | None


Symbol = int | str | Repeated
"""A rule by its number, an expression of the Lark format, or a repetition."""


@dataclass
class Rule:
    """Alternatives of sequences. A `text` stands in place of them, where it calls rules with parameters."""

    alternatives: list[tuple[Symbol, ...]] = field(default_factory=list)
    text: str | None = None


def rules_of(schema: Mapping[str, Any] | bool, start: str, arguments: bool = False) -> str:
    """Returns rules of the Lark format, of which `start` is the first, and all names begin with it.

    Args:
        arguments: the values are the arguments of a tool: objects, which have no property that no schema names.

    Raises:
        StructureError: the schema is invalid, admits no value, is too complex, or uses what is not supported.
    """
    try:
        return _Writer(schema, start, arguments).text()
    except RecursionError:
        raise StructureError("it is too complex; make it simpler") from None


class _Writer:
    """Writes the rules of one schema.

    Args:
        closes: an object that names properties has no others, unless the schema says so.
    """

    def __init__(
        self, schema: Mapping[str, Any] | bool, start: str, arguments: bool = False, *, closes: bool = True
    ) -> None:
        self._schemas = Schemas(schema)
        self._schema = schema
        self._start = start
        self._arguments = arguments
        self._closes = closes
        self._rules: list[Rule] = [Rule()]
        self._terminals: dict[str, str] = {}
        self._of_node: dict[Node, int] = {}
        self._of_text: dict[Text, list[str]] = {}
        self._waiting: list[tuple[int, Node]] = []

    def text(self) -> str:
        ends = self._finished()
        if 0 not in ends:
            self._refuse()
        return self._written(ends)

    def _finished(self) -> set[int]:
        """Makes all rules. Returns those that have a finite text."""
        self._rules[0].alternatives = [(self._rule(self._schemas.root),)]
        if self._arguments:
            self._rules[0].alternatives = self._argument_objects()
        while self._waiting:
            number, node = self._waiting.pop()
            self._rules[number].alternatives = self._alternatives(self._schemas.shapes(node))
        return self._ending()

    def _refuse(self) -> None:
        narrowed = ", ".join(sorted(self._schemas.narrowed))
        if narrowed:
            raise StructureError(f"the schema admits no value, or its complement is not supported (of {narrowed})")
        if self._closes and 0 in _Writer(self._schema, self._start, closes=False)._finished():
            raise StructureError(
                "the schema admits no value whose objects have only the properties that it names; name those that it "
                "needs, or allow others by additionalProperties"
            )
        raise StructureError("the schema admits no finite value")

    def _argument_objects(self) -> list[tuple[Symbol, ...]]:
        found: list[tuple[Symbol, ...]] = []
        self._waiting.clear()
        self._of_node.clear()
        for shape in self._schemas.shapes(self._schemas.root):
            if shape.object_ is None:
                continue
            if shape.values is not None:
                values = [value for value in shape.values if value.startswith("{")]
                found += self._alternatives([JsonShape(object_=shape.object_, values=tuple(values))])
            else:
                found.append(self._object(shape.object_, opened=False))
        if not found:
            raise StructureError("the arguments of a tool are an object, which the schema does not admit")
        return found

    # Values.

    def _rule(self, node: Node) -> int:
        if node not in self._of_node:
            self._of_node[node] = self._new()
            self._waiting.append((self._of_node[node], node))
        return self._of_node[node]

    def _new(self, *alternatives: tuple[Symbol, ...]) -> int:
        if len(self._rules) >= MAX_RULES:
            raise StructureError("it is too complex; make it simpler")
        self._rules.append(Rule(list(alternatives)))
        return len(self._rules) - 1

    def _alternatives(self, shapes: Sequence[JsonShape]) -> list[tuple[Symbol, ...]]:
        found: dict[tuple[Symbol, ...], None] = {}
        values: dict[str, None] = {}
        for shape in shapes:
            if shape.values is not None:
                values |= {value: None for value in shape.values if self._schemas.admits(shape, json.loads(value))}
            else:
                found |= dict.fromkeys(self._parts(shape))
        return [*self._constants(values), *found]

    def _constants(self, values: Sequence[str] | Mapping[str, None]) -> Iterator[tuple[Symbol, ...]]:
        scalars = [value for value in values if value[0] not in "[{"]
        if scalars:
            # One terminal, which the lexer follows as one state, where a rule would have an item for each value.
            yield (self._terminal(" | ".join(map(_quoted, scalars))),)
        for value in values:
            if value[0] in "[{":
                yield tuple(self._tokens(self._schemas.written.get(value, json.loads(value))))

    def _tokens(self, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield '"{"'
            for index, (name, inner) in enumerate(value.items()):
                yield from [COMMA] if index else []
                yield _literal(name)
                yield COLON
                yield from self._tokens(inner)
            yield '"}"'
        elif isinstance(value, list):
            yield '"["'
            for index, inner in enumerate(value):
                yield from [COMMA] if index else []
                yield from self._tokens(inner)
            yield '"]"'
        else:
            yield _quoted(canonical(value))

    def _parts(self, shape: JsonShape) -> Iterator[tuple[Symbol, ...]]:
        words = (["null"] if shape.null else []) + [json.dumps(truth) for truth in sorted(shape.booleans)]
        yield from self._constants(words)
        if shape.numbers:
            yield from ((symbol,) for symbol in self._numbers(shape.numbers))
        if shape.text:
            yield from ((self._terminal(text),) for text in self._texts(shape.text))
        if shape.array:
            yield self._array(shape.array)
        if shape.object_:
            yield self._object(shape.object_)

    def _terminal(self, expression: str) -> str:
        """Returns the name of a terminal."""
        return self._terminals.setdefault(expression, f"{self._start.upper()}_T{len(self._terminals)}")

    def _numbers(self, numbers: Numbers) -> Iterator[Symbol]:
        step = common_step(numbers.steps | ({1} if numbers.integer else set()))  # type: ignore[arg-type]
        if numbers.integer is False and step is not None and step.denominator == 1:
            return
        if step is None or step == 1 or fraction_step(step):
            if step == 1:
                numbers = replace(numbers, integer=True, steps=frozenset())
            expressions = list(terminals(numbers)) if numbers.possible else []
            if not numbers.integer and None not in (numbers.low, numbers.high):
                expressions = [expression for expression in expressions if _possible(expression)]
            if expressions:
                yield self._terminal(" | ".join(expressions))
            return
        if numbers.integer is False or max(step.numerator, step.denominator) >= 10**MAX_STEP_DIGITS:
            raise StructureError("multipleOf: this step is not supported")
        yield from self._multiples(numbers)

    def _multiples(self, numbers: Numbers) -> Iterator[Symbol]:
        """Yields the multiples of a step. The engine's rules have no negative ones."""
        step = common_step(numbers.steps | ({1} if numbers.integer else set()))  # type: ignore[arg-type]
        assert step is not None
        # A reader loses the fraction of a number with more digits.
        most = Fraction(10**DIGITS) if step.denominator == 1 else Fraction(10**SAFE_DIGITS, 10 ** places(step))
        if numbers.both(Numbers(low=_ZERO, high=_ZERO)):
            yield self._terminal('"0"')
        for sign, side in (([], numbers), (['"-"'], numbers.mirrored())):
            low, high = side.low, side.high
            first, last = (0 if low is None else math.ceil(Fraction(low) / step)), None
            first += bool(side.low_open and low is not None and first * step == Fraction(low))
            if high is not None:
                last = math.floor(Fraction(high) / step)
                last -= bool(side.high_open and last * step == Fraction(high))
            first = max(first, 1)
            last = min(last if last is not None else most // step, math.floor(Fraction(most - 1) / step))
            if first > last:
                continue
            leaf = {
                "multipleOf": _json_number(step),
                "minimum": _json_number(first * step),
                "maximum": _json_number(last * step),
            }
            kind = "integer" if step.denominator == 1 else "number"
            text = json.dumps({"type": kind, **leaf})
            yield self._new((*sign, f"%json {text}"))

    def _texts(self, text: Text) -> list[str]:
        """Returns the expression of strings in a list, which is empty if no string is of this shape."""
        if text not in self._of_text:
            self._of_text[text] = list(self._text_expressions(text))
        return self._of_text[text]

    def _text_expressions(self, text: Text) -> Iterator[str]:
        """Yields the expression of strings, unless no string is of this shape."""
        most, parts = text.most, []
        if most is not None or text.least or not text.patterns:
            parts.append(patterns.anything(text.least, most))
        for pattern in text.patterns:
            found = self._schemas.expression(pattern)
            if found is None:
                return
            parts.append(found)
        for pattern in text.excluded_patterns:
            found = self._schemas.expression(pattern)
            if found is not None:
                parts.append(f"~({found})")
        if text.excluded_patterns and len(parts) == len(text.excluded_patterns):
            parts.append(patterns.anything())
        excluded = " | ".join(_quoted(json.dumps(each, ensure_ascii=False)[1:-1]) for each in text.excluded)
        if excluded:
            parts.append(f"~({excluded})")
        expression = patterns.quoted(" & ".join(f"({part})" for part in parts))
        if (len(parts) == 1 and not text.patterns) or _possible(expression):
            yield expression

    # Objects.

    def _object(self, object_: Object, opened: bool | None = None) -> tuple[Symbol, ...]:
        """Returns the sequence of the objects.

        Args:
            opened: whether there are properties that no schema names; None if the schemas decide that.
        """
        schemas = self._schemas
        names = joined(*(layer.names for layer in object_.layers))
        listed, texts = self._names(names)
        layers = [layer for layer in object_.layers if not layer.negative]
        if opened is None:
            opened = (
                not self._closes or any(layer.opens for layer in layers) or not any(layer.closes for layer in layers)
            )
        else:
            opened = any(layer.opens for layer in layers)
        named = [
            (name, self._rule(node), name in object_.required)
            for name in dict.fromkeys((*object_.named, *listed))
            if (node := schemas.property_(object_, name)) != schemas.nothing or name in object_.required
        ]
        others = self._others(object_, [name for name, _, _ in named] + list(object_.named), texts) if opened else []
        fulfilled = sum(needed or schemas.may_have(schemas.property_(object_, name)) for name, _, needed in named)
        missing = object_.least - 1 - fulfilled
        made = self._made_names(others, missing) if missing > 0 else []
        taken = tuple(name for name, _ in made)
        free = [
            (self._terminal(key), COLON, rule)
            for text, rule in others
            for key in self._texts(replace(text, excluded=text.excluded + taken))
        ]
        named += [(name, rule, False) for name, rule in made]
        return ('"{"', _Counted(self, object_, named, free).rule(), '"}"')

    def _made_names(self, others: Sequence[tuple[Text, int]], count: int) -> list[tuple[str, int]]:
        """Returns at most so many names that no schema names, with the rules of their values.

        An object with a minimum may need them: two properties that the rule of all others writes may have one name.
        """
        if count > MAX_MADE_NAMES:
            raise StructureError("minProperties: so many properties that no schema names are not supported")
        found: list[tuple[str, int]] = []
        for text, rule in others:
            while len(found) < count and (expressions := self._texts(text)):
                name = _shortest(expressions[0])
                if name is None:
                    break
                found.append((name, rule))
                text = replace(text, excluded=(*text.excluded, name))
        return found

    def _names(self, node: Node) -> tuple[list[str], list[Text]]:
        """Returns the names that `propertyNames` lists, and the shapes of its others."""
        listed: list[str] = []
        texts: list[Text] = []
        for shape in self._schemas.shapes(node):
            if shape.values is not None:
                listed += [
                    json.loads(value) for value in shape.values if self._schemas.admits(shape, json.loads(value))
                ]
            elif shape.text:
                texts.append(shape.text)
        return [name for name in listed if isinstance(name, str)], texts

    def _others(self, object_: Object, named: Sequence[str], texts: Sequence[Text]) -> list[tuple[Text, int]]:
        """Returns the names and the rules of the properties that are not named, by the patterns that names match."""
        matched = list(dict.fromkeys(pattern for layer in object_.layers for pattern, _ in layer.patterns))
        if len(matched) > MAX_PATTERNS:
            raise StructureError(f"patternProperties: give at most {MAX_PATTERNS} patterns for one object")
        layers = [layer for layer in object_.layers if not layer.negative]
        closed = self._closes and any(one.patterns for one in layers) and not any(one.evaluates for one in layers)
        found: list[tuple[Text, int]] = []
        for text, chosen in product(texts, product([False, True], repeat=len(matched))):
            matching = {pattern for pattern, does in zip(matched, chosen, strict=True) if does}
            if closed and not matching:
                continue
            name = text.both(
                Text(
                    patterns=tuple(pattern for pattern in matched if pattern in matching),
                    excluded_patterns=tuple(pattern for pattern in matched if pattern not in matching),
                    excluded=tuple(dict.fromkeys(named)),
                )
            )
            nodes: list[Node] = []
            for layer in object_.layers:
                nodes += [node for pattern, node in layer.patterns if pattern in matching] or [layer.others]
            node = joined(*nodes)
            if name is not None and node != self._schemas.nothing:
                found.append((name, self._rule(node)))
        return found

    # Arrays.

    def _array(self, array: Array) -> tuple[Symbol, ...]:
        most = array.most
        contained = [one for one in array.contained if one.least or one.most is not None]
        if array.unique and (most is None or most > 1):
            return ('"["', self._different(array, contained), '"]"')
        if contained:
            return ('"["', self._containing(array, contained), '"]"')
        return ('"["', self._items(array, 0), '"]"')

    def _items(self, array: Array, index: int) -> int:
        """Returns the rule of the items from an index on, each after a comma but the first."""
        rule = self._new()
        alternatives = self._rules[rule].alternatives
        least, most = max(0, array.least - index), None if array.most is None else array.most - index
        if not least:
            alternatives.append(('""',))
        if most is None or most > 0:
            item = self._rule(array.at(index))
            if index < array.first:
                alternatives.append((*self._comma(index), item, self._items(array, index + 1)))
            else:
                more = Repeated(item, max(0, least - 1), None if most is None else most - 1)
                if index == 0:
                    alternatives.append((item, more))
                else:
                    alternatives.append((COMMA, item, more))
        return rule

    def _comma(self, index: int) -> tuple[Symbol, ...]:
        return (COMMA,) if index else ()

    def _containing(self, array: Array, contained: Sequence[Contained]) -> int:
        """Returns the rule of arrays that count the items which nodes admit."""
        last = max(array.first, array.least, array.most or 0)
        enough = [one.least if one.most is None else one.most for one in contained]
        if (last + 2) * math.prod(2 * (count + 1) for count in enough) > 2 * MAX_STATES:
            if len(contained) > 1 and all(one.least == 1 and one.most is None for one in contained):
                # One item does for all of them. Others would, too.
                return self._containing(array, [Contained(joined(*(one.node for one in contained)))])
            raise StructureError("contains: its counts, beside those of the items, are too large")
        states: dict[tuple[int, tuple[int, ...]], int] = {}

        def state(index: int, counts: tuple[int, ...]) -> int:
            key = (min(index, last + 1), counts)
            if key not in states:
                states[key] = self._new()
                self._rules[states[key]].alternatives = list(alternatives(*key))
            return states[key]

        def alternatives(index: int, counts: tuple[int, ...]) -> Iterator[tuple[Symbol, ...]]:
            if index >= array.least and all(count >= one.least for count, one in zip(counts, contained, strict=True)):
                yield ('""',)
            if array.most is not None and index >= array.most:
                return
            # An item of a node may count or not: what has no maximum may have more items than are counted.
            choices = ([False, True] if count < most else [False] for count, most in zip(counts, enough, strict=True))
            for chosen in product(*choices):
                nodes = [array.at(index)]
                for one, counted in zip(contained, chosen, strict=True):
                    if counted:
                        nodes.append(one.node)
                    elif one.most is not None:
                        nodes.append(self._schemas.complement(one.node))
                after = tuple(count + counted for count, counted in zip(counts, chosen, strict=True))
                yield (*self._comma(index), self._rule(joined(*nodes)), state(index + 1, after))

        return state(0, (0,) * len(contained))

    def _different(self, array: Array, contained: Sequence[Contained]) -> int:
        """Returns the rule of the arrays of different values of a finite set, in any order."""
        values = self._finite(array.at(0)) if not array.first and not contained else None
        if values is None:
            raise StructureError(
                f"uniqueItems in {array.unique}: it is supported for items of at most {MAX_UNIQUE} values that an enum "
                "lists, without contains"
            )
        if not values:
            return self._new(*([('""',)] if not array.least else []))
        count = len(values)
        if count < array.least:
            return self._new()
        items = [" ".join(symbols) for value in values for symbols in [self._literals(value)]]
        first, more = self._new(), self._new()
        bits = f"[0:{count}]"
        ends = f"bit_count_ge({bits}, {array.least})"
        room = "" if array.most is None else f"bit_count_lt({bits}, {array.most})"
        next_ = f"{self._name(more)}::"

        def taken(index: int, before: str) -> str:
            condition = f"and(bit_clear({index}), {room})" if room else f"bit_clear({index})"
            return f"{before}{items[index]} {next_}set_bit({index}) %if {condition}"

        starts = [taken(index, "") for index in range(count)]
        follows = [taken(index, f"{COMMA} ") for index in range(count)]
        none = ['""'] if not array.least else []
        self._rules[first].text = "\n  | ".join([*none, *starts])
        self._rules[more].text = "\n  | ".join([f'"" %if {ends}', *follows])
        self._rules[first].alternatives = [()]
        self._rules[more].alternatives = [()]
        return self._new((self._parametric(first),))

    def _parametric(self, rule: int) -> str:
        return f"{self._name(rule)}::0x0"

    def _literals(self, value: str) -> tuple[str, ...]:
        return tuple(self._tokens(self._schemas.written.get(value, json.loads(value))))

    def _finite(self, node: Node) -> list[str] | None:
        """Returns the values of a node; None if there are too many or they cannot be listed."""
        found: dict[str, None] = {}
        for shape in self._schemas.shapes(node):
            if shape.values is not None:
                found |= {value: None for value in shape.values if self._schemas.admits(shape, json.loads(value))}
                continue
            numbers = shape.numbers.listed(MAX_UNIQUE) if shape.numbers else []
            if numbers is None or shape.text or shape.array or shape.object_:
                return None
            words = (["null"] if shape.null else []) + [json.dumps(truth) for truth in sorted(shape.booleans)]
            found |= dict.fromkeys(words + [str(number) for number in numbers])
        return list(found) if len(found) <= MAX_UNIQUE else None

    # The text.

    def _ending(self) -> set[int]:
        """Returns the rules that have a finite text: the least fixed point."""
        users: dict[int, list[tuple[int, int]]] = {}
        open_: dict[tuple[int, int], int] = {}
        found: set[int] = set()
        waiting: list[int] = []
        for number, rule in enumerate(self._rules):
            for index, symbols in enumerate(rule.alternatives):
                needed = {need for symbol in symbols if (need := _needed(symbol)) is not None}
                open_[number, index] = len(needed)
                for need in needed:
                    users.setdefault(need, []).append((number, index))
                if not needed:
                    waiting.append(number)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            for user, index in users.get(number, ()):
                open_[user, index] -= 1
                if not open_[user, index]:
                    waiting.append(user)
        return found

    def _written(self, ends: set[int]) -> str:
        lines, used, waiting = [], {0}, [0]
        terminals_: set[str] = set()
        while waiting:
            number = waiting.pop()
            rule = self._rules[number]
            if rule.text is not None:
                lines.append(f"{self._name(number)}::_: {rule.text}")
                continue
            kept = [
                [symbol for symbol in symbols if not _empty(symbol, ends)]
                for symbols in rule.alternatives
                if all(_needed(symbol) is None or _needed(symbol) in ends for symbol in symbols)
            ]
            lines.append(f"{self._name(number)}: " + "\n  | ".join(map(self._sequence, kept)))
            for symbol in (symbol for symbols in kept for symbol in symbols):
                if isinstance(symbol, str):
                    terminals_.add(symbol)
                    waiting.extend(self._called(symbol, used))
                    continue
                inner = symbol if isinstance(symbol, int) else symbol.rule
                if inner not in used:
                    used.add(inner)
                    waiting.append(inner)
        lines += [f"{name}: {text}" for text, name in self._terminals.items() if name in terminals_]
        return "\n".join(lines)

    def _called(self, symbol: str, used: set[int]) -> list[int]:
        """Returns the rules with parameters that a symbol calls: the first one and, after it, the one of the others."""
        if not symbol.endswith("::0x0"):
            return []
        first = int(symbol.removesuffix("::0x0").rpartition("_r")[2])
        used |= {first, first + 1}
        return [first, first + 1]

    def _sequence(self, symbols: Sequence[Symbol]) -> str:
        return " ".join(map(self._symbol, symbols)) or '""'

    def _symbol(self, symbol: Symbol) -> str:
        if isinstance(symbol, str):
            return symbol
        if isinstance(symbol, int):
            return self._name(symbol)
        most = "" if symbol.most is None else symbol.most
        return f"({COMMA} {self._name(symbol.rule)}){{{symbol.least},{most}}}"

    def _name(self, rule: int) -> str:
        return self._start if rule == 0 else f"{self._start}_r{rule}"


class _Counted:
    """Writes the rules of an object's properties, which count what was written as far as its bounds need it."""

    def __init__(
        self,
        writer: _Writer,
        object_: Object,
        named: Sequence[tuple[str, int, bool]],
        others: Sequence[tuple[Symbol, ...]],
    ) -> None:
        self._writer = writer
        self._named = named
        self._others = [writer._new(other) for other in others]
        required = sum(needed for _, _, needed in named)
        self._least = object_.least if object_.least > required else 0
        self._most = object_.most if others or (object_.most or 0) < len(named) else None
        self._cap = max(1, self._least, self._most or 0)
        if (len(named) + 1) * (self._cap + 1) > max(MAX_STATES, 4 * len(named)):
            raise StructureError("minProperties or maxProperties: beside so many properties it is not supported")
        self._states: dict[tuple[int, int], int] = {}

    def rule(self) -> int:
        # From the last property on, so that no rule is written within another one.
        for index in range(len(self._named), -1, -1):
            for count in range(min(index, self._cap) + 1):
                self._states[index, count] = self._state(index, count)
        return self._states[0, 0]

    def _state(self, index: int, count: int) -> int:
        if index == len(self._named):
            return self._rest(count)
        name, value, needed = self._named[index]
        alternatives: list[tuple[Symbol, ...]] = []
        if self._most is None or count < self._most:
            after = self._states[index + 1, min(count + 1, self._cap)]
            alternatives.append((*self._comma(count), _literal(name), COLON, value, after))
        if not needed:
            alternatives.append((self._states[index + 1, count],))
        return self._writer._new(*alternatives)

    def _rest(self, count: int) -> int:
        """Returns the rule of the properties that are not named; they count as one, because they may have one name."""
        alternatives: list[tuple[Symbol, ...]] = []
        if count >= self._least:
            alternatives.append(('""',))
        room = None if self._most is None else self._most - count
        if self._others and count + 1 >= self._least and (room is None or room > 0):
            other = self._writer._new(*((rule,) for rule in self._others))
            more = Repeated(other, 0, None if room is None else room - 1)
            alternatives.append((*self._comma(count), other, more))
        return self._writer._new(*alternatives)

    def _comma(self, count: int) -> tuple[Symbol, ...]:
        return (COMMA,) if count else ()


def _possible(expression: str) -> bool:
    """Tells whether some text matches an expression.

    Raises:
        StructureError: the engine does not support it.
    """
    engine = _engine(expression)
    if engine.is_error():
        if "nsatisfiable" in engine.get_error():
            return False
        raise StructureError("a regular expression is invalid or not supported")
    return any(engine.compute_bitmask()) and not engine.is_error()


def _shortest(expression: str) -> str | None:
    """Returns a short string whose JSON text an expression matches; None if none is found."""
    found = EndFinder(lambda: _engine(expression), BYTES).after(())
    return None if found is None else json.loads(bytes(found))


def _engine(expression: str) -> LLMatcher:
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: T\nT: {expression}"}]}, ensure_ascii=False)
    return LLMatcher(BYTES.tokenizer, grammar, log_level=0)


def _needed(symbol: Symbol) -> int | None:
    """Returns the rule that a symbol cannot do without."""
    if isinstance(symbol, int):
        return symbol
    if isinstance(symbol, Repeated) and symbol.least:
        return symbol.rule
    return None


def _empty(symbol: Symbol, ends: set[int]) -> bool:
    """Tells whether a symbol admits the empty text alone."""
    return isinstance(symbol, Repeated) and (symbol.most == 0 or symbol.rule not in ends)


def _literal(text: str) -> str:
    """Returns the expression of one JSON string."""
    return _quoted(json.dumps(text, ensure_ascii=False))


def _quoted(text: str) -> str:
    """Returns a literal of the Lark format, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _json_number(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)
