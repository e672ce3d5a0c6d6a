"""The timing model: traces replayed against the rates of a machine, as docs/timing-model.md explains."""
