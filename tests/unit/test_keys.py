from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.gateway.gateway import require_keys
from coordinator.gateway.keys import Caller, KeyEntry, KeyRing, new_key
from coordinator.policy.ticket import Priority
from pdserve.config import GatewayConfig, Listen
from pdserve.errors import ConfigError, ErrorReason, RejectedError

GOOD_HASH = "blake3:" + "0" * 64


def test_new_key_has_256_bits_and_its_entry_does_not_hold_it() -> None:
    plain, entry = new_key("acme")
    assert plain.startswith("pd-")
    assert len(plain) == 3 + 43
    assert plain not in entry.model_dump_json()
    assert new_key("acme")[0] != plain


def test_file_round_trip_and_authentication(tmp_path: Path) -> None:
    special = new_key(
        "umbrella",
        admin=True,
        may_choose_mode=False,
        rate="5/second",
        weight=2.5,
        max_priority=Priority.HIGH,
    )
    made = [new_key("acme"), special]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry.model_dump(mode="json") for _, entry in made]}))
    ring = KeyRing.load(path)
    assert not ring.is_open
    (first, first_entry), (second, second_entry) = made
    assert ring.authenticate(f"Bearer {first}") == Caller(
        "acme", first_entry.id, admin=False, may_choose_mode=True, rate=None
    )
    assert ring.authenticate(f"bearer  {second} ") == Caller(
        "umbrella",
        second_entry.id,
        admin=True,
        may_choose_mode=False,
        rate="5/second",
        weight=2.5,
        max_priority=Priority.HIGH,
    )


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer pd-wrong", "Basic abc", "pd-wrong", "Bearer pd-\xff"],
)
def test_everything_else_is_unauthenticated(authorization: str | None) -> None:
    _, entry = new_key("acme")
    with pytest.raises(RejectedError) as caught:
        KeyRing([entry]).authenticate(authorization)
    assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert "pd-" not in caught.value.message


def test_empty_ring_lets_nobody_in() -> None:
    with pytest.raises(RejectedError):
        KeyRing([]).authenticate("Bearer x")


def test_open_ring_lets_everybody_in() -> None:
    ring = KeyRing.open_to_all()
    assert ring.is_open
    assert ring.authenticate(None) == ring.authenticate("Bearer whatever")
    assert ring.authenticate(None).admin


def test_anybody_from_a_network_is_no_admin() -> None:
    assert not KeyRing.open_to_all(admin=False).authenticate(None).admin


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("keys: [", "while parsing"),
        ("", "must have fields, `name: value`, and not be empty"),
        ("keys: 5", "keys"),
        ("keys: []\nother: 1", "other"),
        (f"keys: [{{id: a, tenant: t, hash: '{GOOD_HASH}', admin: perhaps}}]", "keys.0.admin"),
        (f"keys: [{{id: a, tenant: t, hash: '{GOOD_HASH}', rate: often}}]", "keys.0.rate"),
        (f"keys: [{{id: a, tenant: '', hash: '{GOOD_HASH}'}}]", "keys.0.tenant"),
        ("keys: [{id: a, tenant: t, hash: pd-plain}]", "keys.0.hash"),
        ("keys: [{id: a, tenant: t}]", "keys.0.hash"),
        (
            f"keys: [{{id: a, tenant: t, hash: '{GOOD_HASH}'}}, "
            f"{{id: a, tenant: u, hash: '{GOOD_HASH}'}}]",
            "two keys share the id 'a'",
        ),
    ],
)
def test_bad_file_is_one_line_that_names_the_fault(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        KeyRing.load(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message


def test_missing_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.load(tmp_path / "none.yaml")
    path = tmp_path / "keys.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        KeyRing.load(path)


def test_entry_refuses_a_rate_that_is_none() -> None:
    with pytest.raises(ValueError, match="rate"):
        new_key("acme", rate="fast")
    assert KeyEntry(id="a", tenant="t", hash=GOOD_HASH, rate="10/minute").rate == "10/minute"


ANY, LOOPBACK = Listen(host="0.0.0.0", port=1), Listen(port=1)


@pytest.mark.parametrize(
    ("http", "grpc", "config", "fault"),
    [
        (LOOPBACK, LOOPBACK, GatewayConfig(), None),
        (ANY, LOOPBACK, GatewayConfig(), "http listens on 0.0.0.0:1 without"),
        (LOOPBACK, ANY, GatewayConfig(), "grpc listens on 0.0.0.0:1 without"),
        (ANY, ANY, GatewayConfig(allow_anonymous=True), None),
        (ANY, ANY, GatewayConfig(keys_file=Path("keys.yaml")), None),
    ],
)
def test_listeners_beyond_loopback_need_keys(
    http: Listen, grpc: Listen, config: GatewayConfig, fault: str | None
) -> None:
    if fault is None:
        require_keys(http, grpc, config)
    else:
        with pytest.raises(ConfigError, match=fault):
            require_keys(http, grpc, config)
