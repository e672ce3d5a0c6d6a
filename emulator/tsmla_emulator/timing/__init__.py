"""The timing model: traces replayed against the rates of a machine, as emulator/docs/timing-model.md explains."""
