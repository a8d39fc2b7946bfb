"""tools -- tests the programs of tools/."""
