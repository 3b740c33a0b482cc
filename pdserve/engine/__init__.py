"""Engines: the seam between the services and what computes tokens."""
