"""PTX text -> a module of entries with scoped names resolved, registers placed and instructions encoded."""
