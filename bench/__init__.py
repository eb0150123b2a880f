"""Speed beside correctness: measured where there is a GPU, and where there is none a model of the compiled kernels.

| module                    | job                                                                           |
|---------------------------|-------------------------------------------------------------------------------|
| **measured**              |                                                                               |
| cases, ragged             | decode steps to time, and lengths of ragged batches                           |
| contenders, peers         | who is timed: ours, other projects', dense attention                          |
| judge                     | whether an output is right                                                    |
| clocks, memory            | microseconds of a call; whether a case fits                                   |
| measure                   | a case: every contender's time and error                                      |
| roofs                     | what a device could do at best                                                |
| host_cost, growth         | a step's parts on the host, and how cost grows                                |
| **models**                |                                                                               |
| model                     | what compiled kernels could do on a GPU, from static figures                  |
| published                 | what other projects published for a case, to stand beside the model           |
| balance                   | how evenly schedules cut ragged batches                                       |
| **told**                  |                                                                               |
| rows                      | the one format of a measured or modelled row                                  |
| table, pictures           | rows on a terminal, and drawn as one picture                                  |
| run, command              | `pagedmla bench`: a run and its report, and what its options mean             |
| hopper                    | the run of `make gpu`                                                         |
| **accuracy**              | scripts of their own, which need transformers or the engine                   |
| accuracy, layout_cache    | what each cache layout costs a model                                          |
| accuracy_forms            | what each form of the CUTLASS kernels costs                                   |
"""
