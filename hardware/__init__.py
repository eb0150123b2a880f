"""GPUs as this project knows them: what they hold, what they could reach, and what a compiled kernel asks of them.

`targets`                 limits of each architecture, and how many blocks one multiprocessor holds
`cost`                    bytes and FLOPs of a step, published peaks, and the floor that follows: a model
`sass`, `amdgcn`, `loops` the instructions of a disassembly, and its loops
`footprint`               registers, spills, shared memory and instructions of one kernel, as a row of the report
`unwritten`               registers that an MMA reads and nothing wrote: a fault of the assembler
"""
