"""Experiments beside those that run on a coordinator: simulated, on this machine, and made up, to
measure how often the answers of `pdserve.ab` are wrong."""
