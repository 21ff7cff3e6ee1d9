"""Speed, memory and error of each function beside torch, torch.compile and other libraries.

`python -m benchmarks` measures on the machine at hand; `cases` says what, `measure` says how.
"""
