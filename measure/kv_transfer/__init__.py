"""How fast KV blocks travel from one process to another, by each way, in one run.

Two processes, each pinned to a core as two workers on this machine would be, with a KV cache
each in main memory: a holder and a reader. No engine and no model: tensors of the shapes that
SmolLM2 and Llama have. The blocks of a prompt lie scattered as in a cache that has been used.

* memcpy: one copy within the reader, of as many bytes in one stretch.
* socket: a plain TCP connection on loopback, as many bytes in one stretch, no checksum.
* gRPC: pdserve's own transport, the classes that run inside the engine.
* NIXL over shared memory, and over TCP: agents as vLLM makes them, a READ of the same blocks,
  their progress threads paced as pdserve paces them.

Ways take turns within each repeat, so that a machine that drifts is unfair to none. A copy is
timed in the reader, from asking until it is known to be complete; memory is registered,
connections are open and every page was touched before. Each copy is checked afterwards: a block
that is not the right one fails the run.

The second measurement is the tail of a transfer that overlaps its prefill: the holder makes a
chunk readable every so often, slower than a chunk travels, and what counts is the time from the
last chunk to the end of the transfer.
"""
