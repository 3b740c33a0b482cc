"""The parts of a KV transfer on the wire: `FetchResponse` of kv_transfer.proto, hardly copied.

A part with blocks is a well-formed protobuf message, written around the KV bytes and read in
place: protobuf's own parser and serialiser would copy them three times on each side.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from xxhash import xxh3_64, xxh3_64_intdigest

from pdserve.v1.kv_transfer_pb2 import FetchResponse, KvDigest, KvManifest

# Tags are those of the fields in kv_transfer.proto; the two lengths are varints of five bytes
# each, which need not be the shortest, so that every number has its place.
_BLOCKS_TAG = 2 << 3 | 2
_PREFIX = Struct("<B5sBIBIBIBIB5s")
_FIELD_TAGS = (1 << 3 | 5, 2 << 3 | 5, 3 << 3 | 5, 4 << 3 | 5, 5 << 3 | 2)
_SUFFIX = Struct("<BQ")
_CHECKSUM_TAG = 6 << 3 | 1
_INNER = _PREFIX.size - 6 + _SUFFIX.size
"""Bytes of a KvBlocks beside its data."""
_CHECKSUM = Struct("<Q")

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of blocks and layers, and its bytes: layer by layer, block by block."""

    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    data: Buffer
    checksum: int


def write(
    first_block: int, num_blocks: int, first_layer: int, num_layers: int, pieces: list[memoryview]
) -> tuple[bytes, int]:
    """A FetchResponse with blocks, and its checksum; `pieces` together are the data."""
    hasher = xxh3_64()
    length = 0
    for piece in pieces:
        hasher.update(piece)
        length += piece.nbytes
    checksum = hasher.intdigest()
    one, two, three, four, five = _FIELD_TAGS
    prefix = _PREFIX.pack(
        *(_BLOCKS_TAG, _varint(_INNER + length), one, first_block, two, num_blocks),
        *(three, first_layer, four, num_layers, five, _varint(length)),
    )
    return b"".join((prefix, *pieces, _SUFFIX.pack(_CHECKSUM_TAG, checksum))), checksum


def read(message: bytes) -> KvManifest | Part | KvDigest | None:
    """The part in a serialised FetchResponse; None where there is none that is known.

    Its data lies in `message`. Raises google.protobuf.message.DecodeError.
    """
    part = _read_in_place(message)
    if part is not None:
        return part
    response = FetchResponse.FromString(message)
    match response.WhichOneof("part"):
        case "manifest":
            return response.manifest
        case "digest":
            return response.digest
        case "blocks":
            blocks = response.blocks
            return Part(
                *(blocks.first_block, blocks.num_blocks, blocks.first_layer, blocks.num_layers),
                *(blocks.data, blocks.checksum),
            )
        case _:
            return None


def sound(part: Part) -> bool:
    """Whether the data is what the checksum was made of."""
    return xxh3_64_intdigest(part.data) == part.checksum


class Digest:
    """Over the checksums of all parts of a stream, in order."""

    def __init__(self) -> None:
        self._hasher = xxh3_64()
        self.num_parts = 0

    def add(self, checksum: int) -> None:
        self._hasher.update(_CHECKSUM.pack(checksum))
        self.num_parts += 1

    def message(self) -> KvDigest:
        return KvDigest(digest=self._hasher.intdigest(), num_parts=self.num_parts)


def _read_in_place(message: bytes) -> Part | None:
    """None for a message that `write` has not written."""
    length = len(message) - _PREFIX.size - _SUFFIX.size
    if length < 0 or message[0] != _BLOCKS_TAG:
        return None
    fields = _PREFIX.unpack_from(message)
    tag, checksum = _SUFFIX.unpack_from(message, _PREFIX.size + length)
    expected = (_varint(_INNER + length), *_FIELD_TAGS, _varint(length), _CHECKSUM_TAG)
    if (fields[1], *fields[2::2], fields[11], tag) != expected:
        return None
    data = memoryview(message)[_PREFIX.size : _PREFIX.size + length]
    first_block, num_blocks, first_layer, num_layers = fields[3:10:2]
    return Part(first_block, num_blocks, first_layer, num_layers, data, checksum)


def _varint(number: int) -> bytes:
    """In five bytes: up to 35 bits."""
    low = (number >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21))
    return bytes((*low, number >> 28))
