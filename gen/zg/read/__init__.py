"""read -- reads files into a Spec; raises every user error."""
