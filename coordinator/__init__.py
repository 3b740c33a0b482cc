"""The coordinator: façades, gateway, policy, dispatch, and what it knows of the fleet."""

import os

# Read when gRPC is first imported, in this process: its own polling thread then reads from the
# workers, where its event engine would hand each message over between two threads. See ADR 2.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
