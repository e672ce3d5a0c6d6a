"""Kernels of other projects ("controls"), which keep the emulator's checks honest: right numbers, only stated findings.

`python -m tsmla_emulator.prove.controls` runs them from the packages that are installed; none of their code is kept
here.
"""
