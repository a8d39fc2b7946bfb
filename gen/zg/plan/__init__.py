"""plan -- the Plan as a value, with its text and its loops."""
