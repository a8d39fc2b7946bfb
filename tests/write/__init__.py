"""write -- tests the writers."""
