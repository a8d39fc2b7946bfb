"""lib -- shared code of the tests."""
