"""Device code that the Triton kernels share: the walk of a key token, one step a module.

requests -> pieces -> pages -> cache_rows -> scales -> masks -> softmax -> attention
"""
