"""Translates xgrammar's structural tags, which vLLM takes as a response format, to the Lark format of llguidance.

A tag is text between a beginning and an end, such as a call of a function; text that is free leads on to it. The lexer
never takes a character back, so free text and what ends it are one terminal, whose text goes on to the first place at
which one of its ends stands.

Source: https://github.com/mlc-ai/xgrammar/blob/main/docs/tutorials/structural_tag.md, of release 0.2.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from privmix.structure.errors import StructureError
from privmix.structure.limits import MAX_COUNT, check_schema, check_size

Ends = tuple[str, ...] | None
"""The strings one of which follows; none if what follows is no string, and None if nothing follows."""
Rules = Callable[[Any, str], str]
"""Returns the rules of a JSON Schema, given the name of the first one."""

_ANY = r"/(.|\n)*/"
_TOKENS = ("token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")


def grammars_of(tag: Any, rules: Rules, lark: Callable[[str], str]) -> list[dict[str, str]]:
    """Returns the grammars of a structural tag, the first of which uses the others.

    Args:
        lark: returns a grammar of a client in the Lark format.
        tag: `{"format": ...}`, or the older `{"structures": [...], "triggers": [...]}`.

    Raises:
        StructureError: it is too large, has no such form, or uses what is not supported: formats of tokens by their
            numbers, other styles than JSON, limits of tokens, and free text before what does not begin with a string.
    """
    check_schema(tag)
    check_size(json.dumps(tag))
    return _Writer(rules, lark).grammars(_older(tag) if "structures" in _object(tag, "a structural tag") else tag)


def _older(tag: Mapping[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "begin": _field(structure, "begin", str),
            "content": {"type": "json_schema", "json_schema": _schema(structure, "schema")},
            "end": _field(structure, "end", str),
        }
        for structure in _field(tag, "structures", list)
    ]
    return {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}


class _Writer:
    def __init__(self, rules: Rules, lark: Callable[[str], str]) -> None:
        self._rules = rules
        self._lark = lark
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._others: list[dict[str, str]] = []
        self._formats: dict[str, Callable[[Mapping[str, Any], Ends], str]] = {
            "const_string": lambda given, ends: _text(_field(given, "value", str), ends),
            "json_schema": self._json,
            "any_text": self._any_text,
            "grammar": self._grammar,
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "dispatch": self._dispatch,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda given, ends: self._repeated(given, ends, "?"),
            "plus": lambda given, ends: self._repeated(given, ends, "+"),
            "star": lambda given, ends: self._repeated(given, ends, "*"),
            "repeat": self._repeat,
        }

    def grammars(self, tag: Mapping[str, Any]) -> list[dict[str, str]]:
        start = self._format(tag.get("format"), None)
        lark = "\n".join([f"start: {start}", *self._lines])
        return [{"lark_grammar": lark}, *self._others]

    # Each of these returns an expression of a format and, if there are `ends`, of one of them after it.

    def _format(self, given: Any, ends: Ends) -> str:
        kind = _field(given, "type", str, "a format")
        if kind not in self._formats:
            reason = "formats of tokens are" if kind in _TOKENS else "a type of a format is"
            raise StructureError(f"{reason} not supported; supported are {', '.join(self._formats)}")
        return self._formats[kind](given, ends)

    def _json(self, given: Mapping[str, Any], ends: Ends) -> str:
        if given.get("style", "json") != "json" or given.get("excludes") or given.get("max_whitespace_cnt") == 0:
            raise StructureError("json_schema: style, excludes and max_whitespace_cnt are not supported")
        name = self._name("json")
        self._lines.append(self._rules(_schema(given, "json_schema"), name))
        return f"{name} {_either(ends)}"

    def _any_text(self, given: Mapping[str, Any], ends: Ends) -> str:
        if given.get("max_tokens") is not None:
            raise StructureError("any_text: max_tokens is not supported; use max_chars")
        most = given.get("max_chars")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            raise StructureError("max_chars is no whole number from 0 on")
        return self._free((), ends, _strings(given, "excludes"), most)

    def _free(self, triggers: Iterable[str], ends: Ends, excludes: Sequence[str], most: int | None = None) -> str:
        """Returns the expression of text without triggers and of its end."""
        if ends == ():
            raise StructureError("free text must be followed by a string, such as the end of a tag, or by nothing")
        any_ = _ANY if most is None else rf"/(.|\n){{0,{most}}}/"
        if ends is None:
            stops = [*triggers, *excludes]
            return self._terminal(any_ + (f" & ~({_ANY} {_either(stops)} {_ANY})" if stops else "")) + "?"
        return self._terminal(_up_to(any_, ends, [*triggers, *ends], excludes))

    def _grammar(self, given: Mapping[str, Any], ends: Ends) -> str:
        name = self._name("grammar")
        self._others.append({"name": name, "lark_grammar": self._lark(_field(given, "grammar", str))})
        return f"@{name} {_either(ends)}"

    def _regex(self, given: Mapping[str, Any], ends: Ends) -> str:
        pattern = _field(given, "pattern", str).replace("/", r"\/").replace("\n", r"\n")
        return self._terminal(f"/{pattern}/ {_either(ends)}")

    def _sequence(self, given: Mapping[str, Any], ends: Ends) -> str:
        elements = _field(given, "elements", list)
        written: list[str] = []
        at = 0
        while at < len(elements):
            following = _beginning(elements[at + 1]) if at + 1 < len(elements) else None
            last = at + 1 == len(elements)
            if following and _is_free(elements[at]):
                # The text and the beginning of the next element are one terminal.
                written.append(self._format(elements[at], (following,)))
                elements = [*elements[: at + 1], _without_beginning(elements[at + 1]), *elements[at + 2 :]]
            else:
                written.append(self._format(elements[at], ends if last else ()))
            at += 1
        return " ".join(written) or _either(ends) or '""'

    def _or(self, given: Mapping[str, Any], ends: Ends) -> str:
        elements = _field(given, "elements", list)
        if not elements:
            raise StructureError("elements is empty")
        return self._rule([self._format(element, ends) for element in elements])

    def _tag(self, given: Mapping[str, Any], ends: Ends) -> str:
        begin, own = _field(given, "begin", str), _ends(given)
        written = [] if not begin else [_quoted(begin)]
        if own == ("",):
            return " ".join([*written, self._format(given.get("content"), ends)])
        return " ".join([*written, self._format(given.get("content"), own), _either(ends)])

    def _triggered_tags(self, given: Mapping[str, Any], ends: Ends) -> str:
        triggers = _strings(given, "triggers")
        found: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in _field(given, "tags", list):
            begin = _field(tag, "begin", str)
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise StructureError("begin: each tag must begin with exactly one of the triggers")
            found[matching[0]].append(self._tag({**tag, "begin": begin.removeprefix(matching[0])}, ()))
        return self._led(found, ends, given, bool(given.get("stop_after_first")))

    def _dispatch(self, given: Mapping[str, Any], ends: Ends) -> str:
        found: dict[str, list[str]] = {}
        for rule in _field(given, "rules", list):
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise StructureError("rules: give pairs of a string and a format")
            found.setdefault(rule[0], []).append(self._format(rule[1], ()))
        return self._led(found, ends, given, not given.get("loop", True))

    def _led(self, found: Mapping[str, list[str]], ends: Ends, given: Mapping[str, Any], once: bool) -> str:
        """Returns the expression of free text in which each trigger leads on to one of its expressions."""
        found = {trigger: bodies for trigger, bodies in found.items() if bodies}
        if not found:
            raise StructureError("give at least one tag")
        excludes = _strings(given, "excludes")
        stops = [*found, *(ends or ())]
        more = self._name("text")
        after = _either(ends) if once else more
        tags = [
            f"{self._terminal(_up_to(_ANY, (trigger,), stops, excludes))} {body} {after}"
            for trigger, bodies in found.items()
            for body in bodies
        ]
        self._lines.append(f"{more}: " + "\n  | ".join([*tags, self._free(found, ends, excludes)]))
        if not given.get("at_least_one"):
            return more
        return self._rule(
            [f"{_quoted(trigger)} {body} {after}" for trigger, bodies in found.items() for body in bodies]
        )

    def _tags_with_separator(self, given: Mapping[str, Any], ends: Ends) -> str:
        tags = _field(given, "tags", list)
        if not tags:
            raise StructureError("give at least one tag")
        one = self._rule([self._tag(tag, ()) for tag in tags])
        separator = _field(given, "separator", str)
        more = "" if given.get("stop_after_first") else f"({_quoted(separator) if separator else ''} {one})*"
        return f"({one} {more}){'' if given.get('at_least_one') else '?'} {_either(ends)}"

    def _repeated(self, given: Mapping[str, Any], ends: Ends, times: str) -> str:
        return f"({self._format(given.get('content'), ())}){times} {_either(ends)}"

    def _repeat(self, given: Mapping[str, Any], ends: Ends) -> str:
        least, most = given.get("min"), given.get("max")
        if not isinstance(least, int) or not isinstance(most, int) or least < 0 or -1 != most < least:
            raise StructureError("min and max are no bounds; max is -1 for none")
        if max(least, most) > MAX_COUNT:
            raise StructureError(f"min and max: give at most {MAX_COUNT}")
        return self._repeated(given, ends, f"{{{least},{'' if most == -1 else most}}}")

    def _name(self, kind: str) -> str:
        return self._names.setdefault(f"{kind} {len(self._names)}", f"{kind}_{len(self._names)}")

    def _rule(self, alternatives: Iterable[str]) -> str:
        name = self._name("rule")
        self._lines.append(f"{name}: " + "\n  | ".join(alternatives))
        return name

    def _terminal(self, expression: str) -> str:
        if expression not in self._names:
            self._names[expression] = f"TEXT_{len(self._names)}"
            self._lines.append(f"{self._names[expression]}: {expression}")
        return self._names[expression]


def _up_to(any_: str, ends: Iterable[str], stops: Sequence[str], excludes: Sequence[str]) -> str:
    """Returns the terminal of text that ends with one of `ends`, and in which nothing follows one of `stops`."""
    text = rf"({any_} {_either(ends)}) & ~({_ANY} {_either(stops)} /(.|\n)+/)"
    # What is excluded may not stand before the end, but the end may have it.
    return text if not excludes else rf"({text}) & ~({_ANY} {_either(excludes)} {_ANY} {_either(ends)})"


def _is_free(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get("type") in ("any_text", "triggered_tags", "dispatch", "regex")


def _beginning(given: Any) -> str:
    """Returns the string with which all texts of a format begin, as far as it is plain."""
    if not isinstance(given, Mapping):
        return ""
    found = {"const_string": given.get("value"), "tag": given.get("begin")}.get(str(given.get("type")))
    return found if isinstance(found, str) else ""


def _without_beginning(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, ("value" if given["type"] == "const_string" else "begin"): ""}


def _ends(tag: Mapping[str, Any]) -> tuple[str, ...]:
    end = tag.get("end")
    ends = (end,) if isinstance(end, str) else tuple(_strings(tag, "end"))
    if not ends or ("" in ends and len(ends) > 1):
        raise StructureError("end is no string, and no list of strings of which none is empty")
    return ends


def _text(value: str, ends: Ends) -> str:
    return " ".join(filter(None, [_quoted(value) if value else "", _either(ends)])) or '""'


def _either(texts: Iterable[str] | None) -> str:
    """Returns the expression of one of some strings; an empty one if there are none."""
    found = list(dict.fromkeys(texts or ()))
    return f"({' | '.join(map(_quoted, found))})" if found else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise StructureError(f"{what} is no object")
    return given


def _field(given: Any, name: str, kind: type, what: str = "a part of a structural tag") -> Any:
    found = _object(given, what).get(name)
    if not isinstance(found, kind):
        name_of_kind = "string" if kind is str else "list"
        raise StructureError(f"{name} is no {name_of_kind}; structural tags of tokens are not supported")
    return found


def _schema(given: Any, name: str) -> Any:
    found = _object(given, "a part of a structural tag").get(name)
    if not isinstance(found, Mapping | bool):
        raise StructureError(f"{name} is no JSON Schema")
    return found


def _strings(given: Mapping[str, Any], name: str) -> list[str]:
    found = given.get(name, [])
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise StructureError(f"{name} is no list of strings, none of which is empty")
    return found
