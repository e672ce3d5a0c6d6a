"""What tsmla's operators compute, as definitions that flashinfer-bench runs any implementation against."""
