"""What the coordinator costs on the token path, beside vllm-router, in one run at one pace.

Two systems are measured in turn, A B A B, so that a machine that drifts is unfair to neither:

* pdserve: a real coordinator before real decode workers on the simulated engine. One worker
  makes a step of all its sequences every 20 ms, the other answers as fast as it can.
* vllm-router: the real router before a fake vLLM server, which writes the same chunks at the
  same two paces; by its plain routing, and by its prefill/decode mode.

The router under test is pinned to one core, everything else to another. One client process
opens the streams, one after another, and times each read of a socket. A stream that ends with
another number of tokens than asked for fails the run; paced streams are all read to their end,
of those flat out the last are cut off. What is measured, and how:

* CPU per token: CPU time of all threads of the router's processes, as the kernel counts it in
  nanoseconds, over the tokens that the client received, both within the window. User and
  system time alike; the kernel's work on a socket counts for the process that asked for it.
* Added time to first token: while the streams run, the client asks for answers of one token
  from a source that gives them at once, in turn through the router and directly: from the fake
  by HTTP, from the decode worker by the gRPC session that the coordinator itself uses. The
  difference of the two medians, and of the two 99th percentiles.
* Jitter (inter-token latency): how far each gap between two tokens is from 20 ms, on the
  streams through the router and on one stream read directly from the same source in the same
  window. Both are told, and no difference: the direct stream is one and the others are many, and
  a client that reads by gRPC has a jitter of its own.
* Flat out: sources that write without any pace; tokens per second that reach the client, CPU
  per token, the router's part of its core, and how busy the other one was: where the router
  does not use its whole core, the limit was not its own.
"""
