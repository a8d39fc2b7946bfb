"""runtime -- tests the runtime."""
