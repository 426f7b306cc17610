"""What a group says of itself. Log lines and metrics are subscribers to its events; gauges are read from its status."""
