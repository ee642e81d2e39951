"""How attention backends are told of blocks."""
