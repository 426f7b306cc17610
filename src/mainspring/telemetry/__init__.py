"""What a group says of itself: log lines, metrics, status."""
