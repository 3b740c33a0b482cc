"""Requests that nobody would write, against the real coordinator on simulated workers.

Whatever is asked, over HTTP or gRPC: it is answered soon, well or in the documented shape of an
error, with no fault of the server's own, and afterwards nothing is held for it anywhere.
"""
