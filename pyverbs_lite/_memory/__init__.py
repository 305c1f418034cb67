"""Memory: how it is found, made, kept registered and given out."""
