"""write -- a Plan as C, as tables, as text."""
