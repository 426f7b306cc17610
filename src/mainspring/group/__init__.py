"""What a LoopGroup is made of: managed loops and their restarts, the phases of a shutdown, readiness."""
