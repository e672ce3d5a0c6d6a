"""What more than one engine needs. Nothing here imports an engine."""
