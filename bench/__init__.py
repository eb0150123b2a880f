"""Speed beside correctness: measured where there is a GPU, and where there is none a model of the compiled kernels."""
