"""Open-loop load on any server of OpenAI's API, and what its clients saw.

Requests are sent when they are due, whether or not earlier ones were answered, and times count
from when a request was due: a client that fell behind hides nothing (coordinated omission).
Several targets take turns, slot by slot, each slot with the same requests for all of them, so
that a machine that drifts is unfair to none.
"""
