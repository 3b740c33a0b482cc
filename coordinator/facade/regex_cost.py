"""What a regular expression costs, reckoned from its text. Pure.

Ambiguity costs while the answer is written. Repetitions of repetitions that may each be shorter
or longer, `(.{1,8}){1,8}` for example, match the same text in very many ways. The engine follows
all of them at each token, for seconds, and holds up every sequence meanwhile.

Work is what compiling costs, before the answer begins: for each step from character to character
the engine goes through its whole vocabulary.
"""

from __future__ import annotations

import re

MAX_AMBIGUITY = 16
"""Of `(.{1,8}){1,8}` (64) a token took 15 s of one core, of `(.{1,5}){1,5}` (25) up to 1 s."""

MAX_WORK = 1024
"""Of one expression. The costliest that are allowed take xgrammar 0.2.8 five seconds of one core,
with a vocabulary of 49,152: 32 times `.?` (6.5 s; 64 times: minutes), 128 times `.*` (4 s), 500
times `.` (5 s)."""

_OPTIONAL, _REPEATED, _WIDE, _CLASS = 32, 8, 2, 1
_WIDE_TOKENS = (".", "[^", r"\W", r"\S", r"\D")
_CLASS_TOKENS = ("[", r"\w", r"\s", r"\d", r"\p", r"\P")
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*+"')
_REPEATABLE_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*+\]?[?*+]?", re.DOTALL)

# A class that does not end takes all that is left: so no text is looked at twice.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\((?:\?(?:P?<\w{1,32}>|[:=!]|<[=!]))?|\)|\|"
    r"|\{(?P<low>\d{1,9})?(?P<range>,(?P<high>\d{1,9})?)?\}|[*+?]|.",
    re.DOTALL,
)


def ambiguity(pattern: str) -> int:
    """The greatest product of the bounds of repetitions inside one another.

    A repetition of exactly so many adds nothing by itself, and multiplies what is in it; one
    without a bound counts double.
    """
    outer: list[tuple[int, int]] = []
    # The greatest so far in this group, and that of the last thing, which may yet be repeated.
    greatest, last = 1, 1
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        if text[0] == "(":
            outer.append((greatest, last))
            greatest, last = 1, 1
        elif text == ")":
            inside = max(greatest, last)
            greatest, last = outer.pop() if outer else (1, 1)
            greatest, last = max(greatest, last), inside
        elif text in ("*", "+"):
            last = last * 2 if last > 1 else 1
        elif text[0] == "{" and len(text) > 1:
            last *= _bound(token, last)
        elif text != "?":
            greatest, last = max(greatest, last), 1
    return max(greatest, last, *(max(pair) for pair in outer), 1)


def _bound(token: re.Match[str], inside: int) -> int:
    low, high = token["low"], token["high"]
    if token["range"] is None:  # exactly so many
        return int(low or 1) if inside > 1 else 1
    if high is None:
        return 2 if inside > 1 else 1
    return max(int(high), 1)


def work(pattern: str) -> int:
    """The sum over its parts: what may be there or not weighs most, for all that may come instead
    is gone through, then what may be there more often or less."""
    total, is_quantified = 0, False
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        quantifies = text in ("?", "*", "+") or (text[0] == "{" and len(text) > 1)
        if text == "?" and not is_quantified:
            total += _OPTIONAL
        elif text in ("*", "+") or token["range"] is not None:
            total += _REPEATED
        elif text.startswith(_WIDE_TOKENS):
            total += _WIDE
        elif text.startswith(_CLASS_TOKENS):
            total += _CLASS
        is_quantified = quantifies
    return total


def grammar_work(grammar: str) -> int:
    """Of the classes of a grammar in EBNF or Lark, as of those of an expression; what else may be
    there or not, rules and literals, costs little."""
    return sum(work(part) for part in _REPEATABLE_CLASS.findall(_LITERAL.sub("", grammar)))
