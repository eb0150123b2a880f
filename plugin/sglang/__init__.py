"""The SGLang plugin: `--attention-backend pagedmla` serves MLA models through this project.

| module       | job                                                                                     |
|--------------|-----------------------------------------------------------------------------------------|
| entry_points | what SGLang calls when it loads plugins; imports nothing heavy                          |
| settings     | the cache that the environment asks for                                                 |
| handler      | which of DeepSeek's forms of attention the model hands us                               |
| hooks        | what SGLang has no registration for: the class and size of our pool, draft backends     |
| pool         | a token pool of `fp8_rope_bf16`: rows and scales in one slot                            |
| refusals     | a sentence for each thing that we don't serve                                           |
| layers       | a layer's pool and scale, bound once                                                    |
| dense        | long prompts: which steps project keys up, and by which weights                         |
| backend      | a step's lengths and tables; store and attention of every mode                          |
| drafts       | one such backend for each step of a chain of drafts                                     |

`entry_points` and this file load in every process of every SGLang user: they import SGLang inside functions.
"""
