"""The timing model: replays traces against the rates of a machine, as emulator/docs/timing-model.md explains."""
