"""passes -- turns a graph into the parts of a Plan, one pass after the other."""
