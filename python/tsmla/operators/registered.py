"""Registers the operators that are imported, and those that will be, under torch.ops: importing it is enough.

TorchDynamo runs import statements while it traces, and traces everything else.
"""

from .traced import calls, register_offered

__all__ = ["calls"]

register_offered()
