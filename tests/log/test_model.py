"""A stateful model test: the store against a plain dictionary of lists."""
