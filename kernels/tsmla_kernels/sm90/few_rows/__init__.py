"""sm_90a decode of converted rows for requests of few query rows: warp-level products, rows read as they are stored."""
