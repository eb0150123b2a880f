"""What each operation means: float64, written to be read aloud; and one vectorised form of it, the CPU executor.

`cache`        the rows that a request can see
`attention`    absorbed attention over the cache; multi-head attention on dense keys and values
`store`        quantise this step's tokens and write them
`merge`        partial states to one
`vectorised`   attention and store without a Python loop over tokens or heads
"""
