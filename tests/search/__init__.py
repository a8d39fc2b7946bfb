"""search -- tests the search for a plan that fits."""
