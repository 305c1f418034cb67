"""How fast this library is, beside C and beside its peers: ``python -m bench``."""
