"""The fuzzer: random calls of the operators, drawn from everything that their contracts allow, against float64.

A case is a plain dataclass that determines a call entirely, so that its repr is all that is needed to run it again. A
strategy draws cases; a property runs one somewhere (`places.py`) and judges it. The references are written from the
operators' docstrings alone, apart from those of the kernels' own tests.
"""
