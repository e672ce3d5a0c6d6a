"""What a deployer runs, not what a call needs: commands of `tsmla` that are too large for the command line's file."""
