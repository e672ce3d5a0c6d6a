"""sm_90a decode of rows with scales for requests of few query rows: warp-level products, rows read as they are stored.
"""
