"""What a coordinator believes of its workers' prefix caches follows what these hold."""

from __future__ import annotations

from coordinator.policy.prefix import AGES_TO_CONFIRM, PromptBlocks
from coordinator.prompts import ByteEncoder
from pdserve.types import Mode, TextPrompt
from tests.support.asking import LONG_TEXT, decode, http_whole, prefill
from tests.support.patience import WITHIN_S, happens
from tests.support.sim_fleet import FAST, MODEL, SimFleet, sim_fleet

SMALL = FAST.model_copy(update={"kv_capacity_tokens": 2_048})
"""Holds the prompts of two requests and the answer of one."""
BLOCK = 32
WHOLE = len(LONG_TEXT) // BLOCK * BLOCK


def believed(fleet: SimFleet, text: str) -> dict[str, int]:
    token_ids = ByteEncoder(8_192).encode(TextPrompt(text))
    return fleet.coordinator.fleet.cached_tokens(MODEL, PromptBlocks(token_ids, ""))


async def until_believed(fleet: SimFleet, text: str, workers: set[str], tokens: int) -> None:
    """Each of the workers, and no other, is believed to save so many."""

    async def so() -> bool:
        return believed(fleet, text) == dict.fromkeys(workers, tokens)

    assert await happens(so, WITHIN_S)


async def test_both_sides_of_a_hand_off_tell_what_they_hold() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        await http_whole(fleet.coordinator, LONG_TEXT, Mode.DISAGGREGATED)
        for worker in fleet.coordinator.fleet.workers():
            assert worker.cache is not None
            # Told, not only expected: what is expected would be dropped by these.
            for _ in range(AGES_TO_CONFIRM):
                worker.cache.grow_older()
        await until_believed(fleet, LONG_TEXT, {"p", "d"}, WHOLE)


async def test_a_worker_that_evicts_is_not_believed_to_hold_it_still() -> None:
    async with sim_fleet(decode(sim=SMALL)) as fleet:
        await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        await until_believed(fleet, LONG_TEXT, {"d"}, WHOLE)
        for number in range(3):
            await http_whole(fleet.coordinator, f"{number} {LONG_TEXT}", Mode.COLOCATED)
        await until_believed(fleet, LONG_TEXT, {"d"}, 0)
        await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        outcomes = {
            outcome: fleet.coordinator.metric("prefix_predicted_tokens_total", outcome=outcome)
            for outcome in ("hit", "missed", "unforeseen")
        }
        assert outcomes == {"hit": WHOLE, "missed": 0, "unforeseen": 0}


async def test_a_worker_that_is_restarted_is_believed_to_hold_what_it_tells_alone() -> None:
    async with sim_fleet(decode("d1"), decode("d2")) as fleet:
        await http_whole(fleet.coordinator, LONG_TEXT, Mode.COLOCATED)
        held = believed(fleet, LONG_TEXT)
        (holder,) = (worker_id for worker_id, tokens in held.items() if tokens == WHOLE)
        await fleet.workers[holder].kill()
        await until_believed(fleet, LONG_TEXT, {"d1", "d2"} - {holder}, 0)
        await fleet.workers[holder].start()
        await until_believed(fleet, LONG_TEXT, {"d1", "d2"}, 0)
        await fleet.coordinator.until_all_proven()
