"""Old import paths, kept for one release."""
