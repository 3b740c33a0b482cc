"""What an engine is told of an answer that another one began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replay:
    """The first tokens of an answer, decided and sent by another engine, and how many
    characters of text were sent with them."""

    token_ids: tuple[int, ...]
    num_chars: int
