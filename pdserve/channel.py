"""Client channels between coordinator and workers."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    # A peer that vanished without a word is noticed after 4 s of silence and 5 s more.
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # gRPC pings for reasons of its own, too, and while it waits for such an answer (60 s by
    # default) no keepalive ping is sent.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
PEER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Of a worker's server: a coordinator that was stopped, or lost its network, keeps its
    # connections, and what it asked for is to be freed. gRPC answers pings on threads of its own,
    # so that a coordinator which is merely busy is not taken for dead; but where two real engines
    # load their models on two cores, an answer was seen to take more than 1.25 s.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SIZE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
HOLDER_SILENCE_S = 6.0
"""From when on the two ends of a KV transfer take each other for dead that have not heard of each
other: later than a coordinator does by default (`coordinator.silence_s`), which then ends the
transfer. What is left to judge here is the network between the two, and a machine so busy that it
answers late is not dead."""
_PING_MS = 1_000
_PING_TIMEOUT_MS = round(HOLDER_SILENCE_S * 1000) - _PING_MS
TRANSFER_KEEPALIVE: tuple[tuple[str, int], ...] = (
    # Holders are silent while they compute, readers always; gRPC answers pings on threads of
    # its own.
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)
TRANSFER_OPTIONS: tuple[tuple[str, int], ...] = (
    *TRANSFER_KEEPALIVE,
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", _PING_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)
_CHANNEL_OPTIONS = (
    *KEEPALIVE_OPTIONS,
    *SIZE_OPTIONS,
    # gRPC would answer each message with a ping that measures the bandwidth: a third of the thread
    # switches of reading it. A step's tokens fit the window that a stream begins with.
    ("grpc.http2.bdp_probe", 0),
    # A worker that comes back is found within a second; gRPC's defaults wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Its address may have changed meanwhile; gRPC would ask for names twice a minute at most.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Another channel's failures do not delay this one.
    ("grpc.use_local_subchannel_pool", 1),
    # Calls inside the fleet never go through a proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


def channel(address: str) -> grpc.aio.Channel:
    """A channel to `host:port`; the caller closes it. Connects when it is first used.

    Calls carry the fleet key by `pdserve.fleet_key.call_metadata`: an interceptor would put
    a queue between each stream and its writes.
    """
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
