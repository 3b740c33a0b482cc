"""An OpenTelemetry collector that keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`bodies` is what came, as it came, by any path."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.endpoint = ""

    def spans(self) -> dict[str, list[Span]]:
        """By the name of the service that sent them."""
        found: dict[str, list[Span]] = {}
        for _, body in self.bodies:
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = attributes(sent.resource.attributes)["service.name"]
                spans = [span for scope in sent.scope_spans for span in scope.spans]
                found.setdefault(str(service), []).extend(spans)
        return found


def attributes(pairs: Iterator[KeyValue] | list[KeyValue]) -> dict[str, object]:
    def value(pair: KeyValue) -> object:
        kind = pair.value.WhichOneof("value")
        if kind == "array_value":
            return [item.string_value for item in pair.value.array_value.values]
        return getattr(pair.value, str(kind))

    return {pair.key: value(pair) for pair in pairs}


@contextmanager
def collector() -> Iterator[Collector]:
    """On a port of its own; left, it is gone."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.bodies.append((self.path, body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    kept.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
