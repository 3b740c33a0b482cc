"""The page that a comparison of modes writes: Markdown, from the answers alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measure.bench.answer import Answer
from measure.bench.modes import LONG_TOKENS, Mix
from measure.bench.summary import Summary, Targets, summarise
from measure.page import Section, cell, table
from measure.stats import Percentiles

SECTION = Section("modes on real workers", "make bench-modes")


@dataclass(frozen=True, slots=True)
class Slot:
    """What one arm answered in one turn of `seconds`."""

    mix: Mix
    arm: str
    answers: Sequence[Answer]
    seconds: float


def render(slots: Sequence[Slot], targets: Targets, machine: str, command: str) -> str:
    rounds = len(
        {id(slot) for slot in slots if slot.arm == slots[0].arm and slot.mix == slots[0].mix}
    )
    parts = [
        f"Made by `{command}`: {machine}. Median of {rounds} turns of {slots[0].seconds:.0f} s, in "
        "alternation (lowest to highest). A good answer began within "
        f"{targets.ttft_s:g} s and took at most {targets.tpot_s * 1000:g} ms a token after that.",
    ]
    for mix in dict.fromkeys(slot.mix for slot in slots):
        parts += [
            f"### {mix.name}",
            _told(mix),
            _table([s for s in slots if s.mix == mix], targets),
        ]
    return SECTION.render(parts)


def _told(mix: Mix) -> str:
    low, high = mix.chat_tokens
    chats = f"{mix.chat_rate:g} chats a second ({low} to {high} tokens in, {mix.chat_answer} out)"
    if not mix.long_rate:
        return f"{chats}, Poisson."
    low, high = mix.long_tokens
    longs = f"{mix.long_rate:g} long prompts a second ({low} to {high} in, {mix.long_answer} out)"
    return f"{chats} and {longs}, Poisson."


def _table(slots: Sequence[Slot], targets: Targets) -> str:
    rows = []
    for arm in dict.fromkeys(slot.arm for slot in slots):
        mine = [slot for slot in slots if slot.arm == arm]
        whole = [summarise(slot.answers, targets, slot.seconds) for slot in mine]
        answers = [answer for slot in mine for answer in slot.answers]
        seconds = sum(slot.seconds for slot in mine)
        chats = summarise([a for a in answers if a.prompt_tokens < LONG_TOKENS], targets, seconds)
        longs = [answer for answer in answers if answer.prompt_tokens >= LONG_TOKENS]
        rows.append(
            (
                arm,
                cell([one.goodput for one in whole], 2),
                f"{sum(one.good for one in whole)} of {sum(one.requests for one in whole)}",
                _both(chats.ttft),
                _both(summarise(longs, targets, seconds).ttft) if longs else "-",
                _both(chats.itl, 1000),
                str(sum(sum(one.failures.values()) for one in whole)),
                _modes(whole),
            )
        )
    header = (
        "arm",
        "good answers a second",
        "good",
        "chat TTFT p50 / p99, s",
        "long TTFT p50 / p99, s",
        "chat ITL p50 / p99, ms",
        "failed",
        "served",
    )
    return table(header, rows)


def _both(figure: Percentiles | None, factor: float = 1.0) -> str:
    if figure is None:
        return "-"
    digits = 2 if factor == 1.0 else 0
    return f"{figure.p50 * factor:.{digits}f} / {figure.p99 * factor:.{digits}f}"


def _modes(whole: Sequence[Summary]) -> str:
    counts: dict[str, int] = {}
    for one in whole:
        for mode, count in one.modes.items():
            counts[mode] = counts.get(mode, 0) + count
    return ", ".join(f"{count} {mode}" for mode, count in sorted(counts.items()))
