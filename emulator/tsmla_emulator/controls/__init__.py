"""Kernels of other projects, which keep the emulator's checks honest: right numbers, and no finding but those stated.

`python -m tsmla_emulator.controls` runs them from the packages that are installed; none of their code is kept here.
"""
