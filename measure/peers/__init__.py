"""`pdserve bench` beside other people's load generators: the same load on the same server.

vLLM's own comes with the worker's environment; guidellm has one of its own, `.peers`.
"""
