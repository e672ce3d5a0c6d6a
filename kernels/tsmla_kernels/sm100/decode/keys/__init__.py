"""How keys come to Blackwell's decode: copied by TMA, gathered one by one, converted, with their scales."""
