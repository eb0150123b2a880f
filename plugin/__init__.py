"""Choosing an executor and saying why; the public calls; the command line.

| module                     | job                                                                          |
|----------------------------|------------------------------------------------------------------------------|
| **calls**                  |                                                                              |
| api                        | attend, store, prefill, decompress, merge_states: check, choose, run         |
| ops                        | the same as torch custom ops, for torch.compile and torch.export             |
| plan                       | capacities, executors and workspace, fixed for a series of steps             |
| step                       | one call's arguments, bound and checked: what every executor is handed       |
| **executors**              |                                                                              |
| executors                  | what an executor is, and which is taken                                      |
| executor_cutlass           | the CUTLASS decode kernels on Hopper                                         |
| executor_cutlass_variants  | which of them a step takes                                                   |
| executor_cutlass_model     | their executable model on the CPU                                            |
| executor_triton            | the Triton kernels                                                           |
| executor_host              | what the two below share                                                     |
| executor_torch             | vectorised float32 in torch: the default on a CPU                            |
| executor_reference         | the float64 meaning, token by token                                          |
| proven                     | which compiled kernels passed the tests on a GPU                             |
| self_check                 | a plan's Triton kernels against torch, before they serve                     |
| **serving**                |                                                                              |
| bound                      | a step bound once and a layer once, for engines                              |
| repeat                     | launches recorded for one layer, made again for the others                   |
| dense                      | long prompts: keys projected up from the cache, attended densely             |
| vllm, sglang               | the engines' plugins                                                         |
| **command line**           |                                                                              |
| cli, commands              | `pagedmla`, and a module for each of its commands                            |
| demo                       | `pagedmla demo`                                                              |
| compile_report             | kernels built ahead of time: progress, table, refusals                       |
| report                     | a CacheReport on a terminal                                                  |
| page_maps                  | who is in which page; its letter and colour                                  |
| page_grid, page_picture    | the pages as letters, and as a picture                                       |
| pictures, palette          | pictures as files, and their colours                                         |
| terminal                   | a stranger's text and narrow encodings on a terminal                         |
| **calibration**            |                                                                              |
| calibrate                  | a model's latents, read in the engine, and what each layout makes of them    |
| latent_statistics          | ranges, lost codes and errors of one layer                                   |
| checkpoint_scales          | a checkpoint's k_scale: read, or laid over it                                |
"""
