"""Other projects' kernels, to run beside tsmla's: a file for each package that a user can install, under the package's
name.

A function here takes a Case of benchmarks.bench_decode or bench_prefill and returns a callable that launches the other
kernel on the case's tensors and returns its output, or None where it cannot do the case. What it plans once for many
layers is planned here, outside of what is timed. For the runners' `--against`:

    python -m benchmarks decode --against fa3_mla=benchmarks.peers.vllm_wheel:fa3_mla
"""
