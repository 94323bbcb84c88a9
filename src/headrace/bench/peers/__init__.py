"""Other brokers, measured with the same load generator."""
