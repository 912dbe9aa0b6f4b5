"""The operator sweep: every operator of PyTorch's own test databases, compiled by Triptych and compared with eager.

`python -m tests.sweep --help` says what can be chosen; `make sweep` runs all of it.
"""
