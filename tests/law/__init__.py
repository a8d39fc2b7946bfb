"""law -- tests results of training."""
