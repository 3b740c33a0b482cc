"""The pure parts of the benchmark of KV transfers, and one copy by each way that is exact."""

from __future__ import annotations

import itertools

import pytest
import torch

from measure.kv_transfer import plan, report
from measure.kv_transfer.cache import Cache, used_blocks
from measure.kv_transfer.jobs import LLAMA_8B, LLAMA_70B, SMOLLM2, Copied, Model, Way
from measure.kv_transfer.over_grpc import GrpcLink, GrpcSource
from measure.kv_transfer.plain import SocketLink, SocketSource
from measure.kv_transfer.plan import Measured
from measure.kv_transfer.ways import HOLDER, READER, Prompt

TINY = Model("tiny", 2, 1, 4)


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [
        # Keys and values, 128 tokens, layers, KV heads, head, two bytes a number.
        (SMOLLM2, 2 * 128 * 30 * 3 * 64 * 2),
        (LLAMA_8B, 2 * 128 * 32 * 8 * 128 * 2),
        (LLAMA_70B, 2 * 128 * 80 * 8 * 128 * 2),
    ],
)
def test_the_bytes_of_a_prompt(model: Model, num_bytes: int) -> None:
    assert model.num_bytes(128) == num_bytes
    assert model.num_bytes(97) == num_bytes, "blocks are whole"


def test_a_prompt_that_does_not_fit_is_left_out() -> None:
    gigabyte = 10**9
    assert plan.fitting(LLAMA_70B, plan.NUM_TOKENS, 16 * gigabyte) == plan.NUM_TOKENS
    # Two caches of 1.25 times 2.7 GB, and 2.7 GB more.
    assert plan.fitting(LLAMA_70B, plan.NUM_TOKENS, 9 * gigabyte) == (128, 512, 2048)
    assert plan.fitting(LLAMA_70B, plan.NUM_TOKENS, 0) == ()


def test_a_used_cache_gives_each_block_once_and_scattered() -> None:
    blocks = used_blocks(320, 256, seed=1)
    assert len(set(blocks)) == 256
    assert set(blocks) <= set(range(320))
    together = sum(right == left + 1 for left, right in itertools.pairwise(blocks))
    assert 0 < together < 128, "a run here and there, either way round"
    assert blocks == used_blocks(320, 256, seed=1) != used_blocks(320, 256, seed=2)


def test_a_cache_tells_whose_blocks_it_holds() -> None:
    theirs, ours = Cache(TINY, 128, HOLDER), Cache(TINY, 128, READER)
    from_blocks, to_blocks = [3, 0, 2], [1, 4, 0]
    assert not ours.holds(to_blocks, HOLDER, from_blocks)
    ours.tensor[:, to_blocks] = theirs.tensor[:, from_blocks]
    assert ours.holds(to_blocks, HOLDER, from_blocks)
    assert not ours.holds(to_blocks, HOLDER, [3, 2, 0]), "the order counts"
    ours.tensor[1, 4, -1] ^= 1
    assert not ours.holds(to_blocks, HOLDER, from_blocks)
    ours.mark(to_blocks)
    assert ours.holds([1, 4], READER, [1, 4])


@pytest.mark.parametrize("chunk_s", [0.0, 0.001], ids=["at once", "paced"])
def test_a_copy_over_grpc_is_exact(chunk_s: float) -> None:
    theirs, ours = Cache(TINY, 512, HOLDER), Cache(TINY, 512, READER)
    theirs.tensor.random_(0, 256)
    prompt = Prompt(1, 512, TINY.num_bytes(512), list(range(16)), list(range(15, -1, -1)), chunk_s)
    source = GrpcSource(theirs)
    link = GrpcLink(ours, source.hello())
    source.expect(prompt)
    link.copy(prompt)
    link.close()
    source.close()
    assert torch.equal(ours.tensor[:, prompt.ours], theirs.tensor[:, prompt.theirs])
    assert (source.last_chunk_at > 0) == bool(chunk_s)


def test_a_copy_over_a_plain_socket_is_exact() -> None:
    theirs, ours = Cache(TINY, 512, HOLDER), Cache(TINY, 512, READER)
    theirs.tensor.random_(0, 256)
    source = SocketSource(theirs)
    link = SocketLink(ours, source.hello())
    link.copy(Prompt(1, 512, 1_000, [], []))
    link.close()
    source.close()
    assert torch.equal(ours.tensor.view(-1)[:1_000], theirs.tensor.view(-1)[:1_000])


def measured() -> list[Measured]:
    """SmolLM2, 128 tokens: 2,949,120 bytes; in three runs."""
    seconds = {Way.MEMCPY: 0.5, Way.SOCKET: 1.0, Way.GRPC: 1.6, Way.NIXL_SHM: 1.2}
    return [
        Measured(SMOLLM2, Copied(way, 128, factor * ms / 1e3, 2.94912e-3, 5.89824e-3, paced))
        for factor in (1.0, 0.5, 2.0)
        for way, ms, paced in (
            *((way, seconds.get(way, 4.0), False) for way in Way),
            (Way.GRPC, 0.25, True),
        )
    ]


def test_the_report_has_medians_ranges_and_ratios_to_the_socket() -> None:
    text = report.render(measured(), "A machine", "make bench-kv", ["A note."])
    assert "Made by `make bench-kv`: A machine. Median of 3 runs" in text
    assert "A note." in text
    assert (
        "| 128 | 2.9 | gRPC | 1.60 (0.80 to 3.20) | 1.84 (0.92 to 3.69) | 0.62 "
        "| 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) |" in text
    )
    assert "| 128 | 2.9 | socket | 1.00 (0.50 to 2.00) | 2.95 (1.47 to 5.90) | 1.00 " in text


def test_the_report_tells_the_tail_and_what_was_aimed_at() -> None:
    text = report.render(measured(), "m", "c", [])
    assert "| SmolLM2-135M | 128 | 0.2 (0.1 to 0.5) | 1.6 (0.8 to 3.2) |" in text
    # 4.0 over 1.6, and 1.0 over 1.6.
    assert "| SmolLM2-135M | 128 | 2.50 (met) | 0.62 (met) |" in text


def test_an_aim_that_was_missed_is_told() -> None:
    slow = [
        Measured(each.model, Copied(each.copied.way, 128, 0.01, 0.0, 0.0))
        if each.copied.way is Way.GRPC
        else each
        for each in measured()
    ]
    assert "| SmolLM2-135M | 128 | 0.40 (missed) | 0.10 (missed) |" in report.render(
        slow, "m", "c", []
    )
