"""Whether an answer is right. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator

_FENCE = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL)


def letter(at: int) -> str:
    """A for the first option."""
    return chr(ord("A") + at)


def is_exact(text: str, wanted: str) -> bool:
    """White space around it, case and a full stop at the end aside."""
    return _plain(text) == _plain(wanted)


def matches(text: str, regex: str) -> bool:
    """Anywhere; case counts unless the expression says otherwise."""
    return re.search(regex, text) is not None


def fits(text: str, schema: dict[str, Any]) -> bool:
    """Whether it is JSON of that schema, in a Markdown fence or not."""
    fenced = _FENCE.search(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return False
    return Draft202012Validator(schema).is_valid(value)


def chooses(text: str, options: Sequence[str], answer: str) -> bool:
    """Whether the first letter of an option that stands by itself is the answer's; of a text
    without one, whether the answer is the only option that it names."""
    letters = "".join(letter(at) for at in range(len(options)))
    # A letter alone, or before a full stop or bracket; "A" as a word begins many sentences.
    found = re.search(rf"^\W*([{letters}])\W*$|\b([{letters}])[.):]", text, re.MULTILINE)
    if found is not None:
        return (found[1] or found[2]) == letter(options.index(answer))
    named = [option for option in options if option.casefold() in text.casefold()]
    return named == [answer]


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").casefold()
