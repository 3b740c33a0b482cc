"""Twenty prompts of natural text, from about 10 to about 3,000 tokens."""

from __future__ import annotations

import random

from tests.e2e.fleet import Prompt

_SHORT = (
    Prompt("completion", "One, two, three, four, five, six, seven,"),
    Prompt("chat", "Name three primary colours."),
    Prompt("completion", "The sun rises in the east and"),
    Prompt("chat", "How does a bicycle stay upright while it moves?"),
    Prompt("completion", "Bees fly from flower to flower to collect nectar, and then"),
)
_SUBJECTS = ("The captain", "A young baker", "My neighbour", "The old clockmaker", "Her teacher")
_VERBS = ("found", "repaired", "described", "forgot", "carefully painted", "sold")
_OBJECTS = ("a wooden boat", "the garden gate", "an antique map", "two silver coins", "a red kite")
_PLACES = ("near the harbour", "in the mountains", "behind the school", "at the night market")
_TIMES = ("before sunrise", "on a rainy Tuesday", "after the long winter", "during the festival")

# Words of story before the question: a token is about three quarters of a word.
_STORY_WORDS = (20, 60, 95, 100, 150, 200, 300, 400, 500, 650, 800, 1000, 1300, 1700, 2200)


def _story(words: int, seed: int) -> str:
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        parts = (rng.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES, _TIMES))
        sentences.append(" ".join(parts) + ".")
    return " ".join(sentences)


def prompts() -> list[Prompt]:
    """Chat and completion in turns; the same at every call."""
    long = [
        Prompt("chat", f"{_story(words, words)}\n\nWho is the first person in this story?")
        if number % 2
        else Prompt("completion", f"{_story(words, words)} Then")
        for number, words in enumerate(_STORY_WORDS)
    ]
    return [*_SHORT, *long]
