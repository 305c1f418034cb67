"""A soak: many peers of one server, random operations, cancels and ends, and every byte checked. See ``__main__``."""
