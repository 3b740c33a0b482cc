"""What the coordinator costs on the token path, beside vllm-router, in one run at one pace.

Two systems are measured in turn, A B A B, so that a machine that drifts is unfair to neither:

* pdserve: a real coordinator before real decode workers on the simulated engine. One worker
  makes a step of all its sequences every 20 ms, the other answers as fast as it can.
* vllm-router: the real router before a fake vLLM server, which writes the same chunks at the
  same two paces; by its plain routing, and by its prefill/decode mode.

The router under test has a core of its own; everything else shares another one. One client
process opens the streams, one after another, and times each read of a socket. Every stream is
read to its end, and a token too few fails the run. What is measured, and how:

* CPU per token: CPU time of all threads of the router's processes, as the kernel counts it in
  nanoseconds, over the tokens that the client received, both within the window. User and
  system time alike; the kernel's work on a socket counts for the process that asked for it.
* Added time to first token: while the streams run, the client asks for answers of one token
  from a source that gives them at once, in turn through the router and directly: from the fake
  by HTTP, from the decode worker by the gRPC session that the coordinator itself uses. The
  difference of the two medians, and of the two 99th percentiles.
* Added jitter (inter-token latency): how far each gap between two tokens is from 20 ms, on the
  streams through the router and on one stream read directly from the same source in the same
  window. The difference of the medians, and of the 99th percentiles.
* Flat out: sources that write without any pace; tokens per second that reach the client, CPU
  per token, and how busy both cores were, which tells whose limit it was.
"""
