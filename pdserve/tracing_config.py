"""The section `tracing` of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, Field


class TracingConfig(BaseModel, frozen=True, extra="forbid"):
    """Where spans of requests are sent. Secrets of a collector go in OpenTelemetry's own
    variables, OTEL_EXPORTER_OTLP_HEADERS for example: settings are logged."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^@\s]+$",
        description="an OpenTelemetry collector's OTLP over HTTP, for example "
        "http://127.0.0.1:4318; none: no spans",
    )
