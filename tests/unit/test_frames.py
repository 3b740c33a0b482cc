"""Parts with blocks are plain protobuf messages, written and read without copying them."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from pdserve.engine.kv import frames
from pdserve.v1.kv_transfer_pb2 import FetchResponse, KvBlocks, KvDigest, KvManifest

uint32 = st.integers(0, 2**32 - 1)
numbers = st.tuples(uint32, uint32, uint32, uint32)


@given(numbers, st.lists(st.binary(max_size=300), max_size=4))
def test_protobuf_reads_what_is_written(place: tuple[int, ...], pieces: list[bytes]) -> None:
    message, checksum = frames.write(*place, [memoryview(piece) for piece in pieces])  # type: ignore[call-arg]
    data = b"".join(pieces)
    assert checksum == xxh3_64_intdigest(data)
    assert FetchResponse.FromString(message) == FetchResponse(
        blocks=KvBlocks(
            **dict(
                zip(("first_block", "num_blocks", "first_layer", "num_layers"), place, strict=True)
            ),
            data=data,
            checksum=checksum,
        )
    )


@given(numbers, st.binary(max_size=300), st.booleans())
def test_a_part_is_read_whoever_wrote_it(
    place: tuple[int, ...], data: bytes, rewritten: bool
) -> None:
    message, checksum = frames.write(*place, [memoryview(data)])  # type: ignore[call-arg]
    if rewritten:  # by protobuf, which leaves zeros out
        message = FetchResponse.FromString(message).SerializeToString()
    part = frames.read(message)
    assert isinstance(part, frames.Part)
    assert (part.first_block, part.num_blocks, part.first_layer, part.num_layers) == place
    assert (bytes(part.data), part.checksum) == (data, checksum)
    assert frames.sound(part)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_an_altered_bit_is_found(data: bytes, pick: st.DataObject) -> None:
    message, _ = frames.write(0, 1, 0, 1, [memoryview(data)])
    start = len(message) - len(data) - 9  # the checksum and its tag come last
    bit = pick.draw(st.integers(0, 8 * len(data) - 1))
    altered = bytearray(message)
    altered[start + bit // 8] ^= 1 << bit % 8
    part = frames.read(bytes(altered))
    assert isinstance(part, frames.Part)
    assert not frames.sound(part)


@given(st.binary(max_size=100))
def test_no_message_breaks_the_reader(message: bytes) -> None:
    with contextlib.suppress(DecodeError):
        frames.read(message)


def test_manifest_and_digest_are_told_apart() -> None:
    manifest, digest = KvManifest(num_tokens=1), KvDigest(digest=1)
    assert frames.read(FetchResponse(manifest=manifest).SerializeToString()) == manifest
    assert frames.read(FetchResponse(digest=digest).SerializeToString()) == digest
    assert frames.read(b"") is None


@pytest.mark.parametrize("checksums", [[], [1], [2, 2**64 - 1]])
def test_the_digest_is_over_the_checksums_in_order(checksums: list[int]) -> None:
    digest = frames.Digest()
    for checksum in checksums:
        digest.add(checksum)
    whole = b"".join(checksum.to_bytes(8, "little") for checksum in checksums)
    expected = int.from_bytes(xxh3_64_digest(whole), "big")
    assert digest.message() == KvDigest(digest=expected, num_parts=len(checksums))
