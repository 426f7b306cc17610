"""State that outlives a message: sessions, budgets, overrides."""
