"""What a deployer runs, not what a call needs: the command `tsmla`."""
