"""Studies: several ways of training compared under one set of rules."""
