"""check -- tests the checker."""
