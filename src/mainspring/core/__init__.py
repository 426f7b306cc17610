"""What the rest stands on: clock, randomness, the registry of the process, states, and looking at functions and frames."""
