"""Is one arm of an experiment better than another? Answers that may be looked at all the time.

The unit is a block: one slot of each arm, in random order, never a single request. Pure.
"""
