"""What a LoopGroup is made of: members and their restarts, the phases of a shutdown, readiness."""
