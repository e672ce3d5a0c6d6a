"""The timing model: the emulator's traces, replayed against the rates of a machine. docs/timing-model.md explains it."""
