"""write -- prints a Plan as C, as tables and as text."""
