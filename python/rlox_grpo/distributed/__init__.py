"""Training ranks: process groups, collectives, failure detection and signals."""
