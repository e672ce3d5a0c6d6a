"""`tsmla selftest`, short, on the machine's GPU."""

from __future__ import annotations

from tsmla.tools import cli


def test_every_kernel_of_this_gpu(capsys):
    status = cli.main(["selftest"])
    assert status == 0, capsys.readouterr()
