"""The generated part of the page: Markdown, from the copies alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from measure.kv_transfer.jobs import CHUNK_BYTES_PER_S, CHUNK_TOKENS, Copied, Model, Way
from measure.kv_transfer.plan import Measured
from measure.page import Row, Section, cell, table
from measure.stats import repeated

SECTION = Section("kv transfer", "make bench-kv")

AIM = 0.6
"""Of a plain socket copy's rate: what pdserve's own transport should reach."""


def render(measured: Sequence[Measured], machine: str, command: str, notes: Sequence[str]) -> str:
    """The generated part of the page, with its markers."""
    models = list(dict.fromkeys(each.model for each in measured))
    first = measured[0]
    repeats = sum(_alike(each, first) for each in measured)
    parts = [
        f"Made by `{command}`: {machine}. Median of {repeats} runs in turn (lowest to highest).",
        *notes,
        *(_part(model, [m.copied for m in measured if m.model == model]) for model in models),
        "### The tail of a transfer that overlaps its prefill",
        f"{CHUNK_TOKENS} tokens become readable at a time, at {CHUNK_BYTES_PER_S / 1e9:.1f} GB/s; "
        "milliseconds from the last of them to the end of the transfer, over gRPC.",
        _tails(models, measured),
        "### Against the aims",
        _verdict(models, measured),
    ]
    return SECTION.render(parts)


def _alike(one: Measured, other: Measured) -> bool:
    return (one.model, one.copied.way, one.copied.num_tokens, one.copied.paced) == (
        *(other.model, other.copied.way, other.copied.num_tokens),
        other.copied.paced,
    )


def _part(model: Model, copies: Sequence[Copied]) -> str:
    rows = []
    for num_tokens in _sizes(copies):
        num_bytes = model.num_bytes(num_tokens)
        for way in Way:
            of_way = _of(copies, way, num_tokens)
            rows.append(
                (
                    f"{num_tokens:,}",
                    f"{num_bytes / 1e6:,.1f}",
                    way.value,
                    cell([copied.seconds * 1e3 for copied in of_way], 2),
                    cell([num_bytes / copied.seconds / 1e9 for copied in of_way], 2),
                    f"{_ratio(copies, way, num_tokens):.2f}",
                    cell([copied.holder_cpu_s / num_bytes * 1e9 for copied in of_way], 2),
                    cell([copied.reader_cpu_s / num_bytes * 1e9 for copied in of_way], 2),
                )
            )
    header = (
        *("tokens", "MB", "way", "ms", "GB/s", "of the socket"),
        *("holder's CPU, ns per byte", "reader's"),
    )
    title = (
        f"### {model.name}: {model.num_layers} layers, blocks of {model.bytes_per_block:,} bytes"
    )
    return f"{title}\n\n{table(header, rows)}"


def _tails(models: Iterable[Model], measured: Sequence[Measured]) -> str:
    rows: list[Row] = []
    for model in models:
        copies = [m.copied for m in measured if m.model == model]
        for num_tokens in _sizes(copies):
            paced = [c for c in copies if c.paced and c.num_tokens == num_tokens]
            if paced:
                at_once = _of(copies, Way.GRPC, num_tokens)
                rows.append(
                    (
                        model.name,
                        f"{num_tokens:,}",
                        cell([copied.seconds * 1e3 for copied in paced], 1),
                        cell([copied.seconds * 1e3 for copied in at_once], 1),
                    )
                )
    return table(("model", "tokens", "tail, ms", "whole transfer afterwards, ms"), rows)


def _verdict(models: Iterable[Model], measured: Sequence[Measured]) -> str:
    """Of every size: gRPC's rate over NIXL's by TCP, and over the plain socket's."""
    rows: list[Row] = []
    for model in models:
        copies = [m.copied for m in measured if m.model == model]
        for num_tokens in _sizes(copies):
            of_socket = _ratio(copies, Way.GRPC, num_tokens)
            of_nixl = of_socket / _ratio(copies, Way.NIXL_TCP, num_tokens)
            rows.append(
                (
                    model.name,
                    f"{num_tokens:,}",
                    f"{of_nixl:.2f} ({'met' if of_nixl > 1 else 'missed'})",
                    f"{of_socket:.2f} ({'met' if of_socket >= AIM else 'missed'})",
                )
            )
    header = ("model", "tokens", "over NIXL by TCP (aim: above 1)", f"over the socket (aim: {AIM})")
    return table(header, rows)


def _sizes(copies: Iterable[Copied]) -> list[int]:
    return sorted({copied.num_tokens for copied in copies})


def _of(copies: Iterable[Copied], way: Way, num_tokens: int) -> list[Copied]:
    return [c for c in copies if (c.way, c.num_tokens, c.paced) == (way, num_tokens, False)]


def _ratio(copies: Sequence[Copied], way: Way, num_tokens: int) -> float:
    """The socket's median seconds over this way's."""
    socket, own = (
        repeated([copied.seconds for copied in _of(copies, each, num_tokens)]).median
        for each in (Way.SOCKET, way)
    )
    return socket / own
