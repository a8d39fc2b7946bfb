"""plan -- the Plan, its text, its loops."""
