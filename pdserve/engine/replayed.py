"""What an engine gives out of an answer whose beginning it only replays. Pure."""

from __future__ import annotations

from pdserve.replay import Replay
from pdserve.types import Delta


class Replayed:
    """Cuts off what was sent before, from an answer's deltas in order."""

    def __init__(self, replay: Replay | None) -> None:
        self._tokens_left = 0 if replay is None else len(replay.token_ids)
        self._chars_left = 0 if replay is None else replay.num_chars

    def cut(self, delta: Delta) -> bool:
        """Leaves in the delta what is new; False where nothing is."""
        if not (self._tokens_left or self._chars_left):
            return True
        tokens = min(self._tokens_left, len(delta.token_ids))
        chars = min(self._chars_left, len(delta.text))
        del delta.token_ids[:tokens]
        if delta.logprobs is not None:
            delta.logprobs = delta.logprobs[tokens:]
        delta.text = delta.text[chars:]
        self._tokens_left -= tokens
        self._chars_left -= chars
        return bool(delta.token_ids or delta.text or delta.finish_reason)
