"""Engine metadata to the values of the cache interface.

Pools and tables are views of the engine's memory; what has to be computed (lengths, SGLang's tables) goes into buffers
of the caller's. No kernel of ours is called here.

`rows`           what all adapters make: a layer's pools, and a step's requests
`vllm`           vLLM's pages and metadata
`sglang`         SGLang's slots and ForwardBatch
`max`, `to_max`  MAX's inputs, in and out
`dlpack`         another library's pages as a tensor, at the distance that they have
"""
