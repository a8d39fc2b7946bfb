"""tests -- tests of the whole program (docs/testing.md)."""
