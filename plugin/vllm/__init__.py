"""The vLLM plugin: `--attention-backend CUSTOM` serves MLA models through pagedmla.

| module          | job                                                                      |
|-----------------|--------------------------------------------------------------------------|
| entry_points    | what vLLM calls when it loads plugins; imports nothing heavy             |
| backend         | what we can serve, and the sentences for what we can't                   |
| cache_dtypes    | --kv-cache-dtype names, and the bytes that a token takes                 |
| builder         | once a step: the engine's metadata as rows, and which call serves them   |
| choices         | the line of the log that says what was chosen and why                    |
| impl            | once a layer: store, and attention of decode, prompt and mixed steps     |
| scales          | a checkpoint's k_scale for caches with one scale a tensor                |
| counters        | which layer ran which kind of step on which executor                     |
| recorder        | latents as they are stored, for `pagedmla calibrate`; off unless asked   |
| cpu_platform    | the engine on a machine without a GPU, for tests and the demonstration   |

What a step and a layer bring is bound by `pagedmla.plugin.bound`; long prompts go dense by `pagedmla.plugin.dense`:
both serve SGLang too.

`entry_points` and this file load in every process of every vLLM user: they import vLLM inside functions.
"""
