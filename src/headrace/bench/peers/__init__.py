"""Other brokers, measured by the same load generator on the same machine in the same run."""
