"""Twenty prompts of natural text, from about 10 to about 3,000 tokens, without near ties.

A bfloat16 logit between 16 and 32 moves in steps of 0.125, so where the two best are that
close, a prompt read in one piece and one of which the last token is read alone may rightly
part. These prompts let the model repeat what it has read. In a float32 run of the same model
(transformers), the two best logits are at least 0.6 apart at each of the first twelve tokens:
a difference between two ways is then a fault.
"""

from __future__ import annotations

import random

from tests.support.fleet import Prompt

_COUNTS = ("a, b, c, d, e,", "1, 2, 3, 4, 5,", "2, 4, 6, 8, 10, 12,", "10, 20, 30, 40, 50,")

# (words, seed) of a story that is to be repeated; for completions also how often it stands there.
_CHATS = ((10, 2), (20, 0), (40, 0), (95, 0), (150, 0), (200, 0), (300, 2), (500, 2))
_COMPLETIONS = (
    (15, 4, 2),
    (30, 7, 2),
    (50, 6, 2),
    (90, 8, 2),
    (200, 0, 2),
    (500, 11, 2),
    (330, 0, 4),
    (330, 0, 8),
)

_SUBJECTS = ("The captain", "A young baker", "My neighbour", "The old clockmaker", "Her teacher")
_VERBS = ("found", "repaired", "described", "forgot", "carefully painted", "sold")
_OBJECTS = ("a wooden boat", "the garden gate", "an antique map", "two silver coins", "a red kite")
_PLACES = ("near the harbour", "in the mountains", "behind the school", "at the night market")
_TIMES = ("before sunrise", "on a rainy Tuesday", "after the long winter", "during the festival")


def _story(words: int, seed: int) -> str:
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        parts = (rng.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES, _TIMES))
        sentences.append(" ".join(parts) + ".")
    return " ".join(sentences)


def begun_again(words: int, seed: int, times: int) -> str:
    """A story of about that many words, `times` over, and then its first twelve words."""
    story = _story(words, seed)
    return " ".join([story] * times + story.split()[:12])


def prompts() -> list[Prompt]:
    """The same at every call."""
    return [
        *(Prompt("completion", count) for count in _COUNTS),
        *(Prompt("chat", f"Repeat this text:\n\n{_story(*size)}") for size in _CHATS),
        *(Prompt("completion", begun_again(*size)) for size in _COMPLETIONS),
    ]
