"""The private parts of servers: the gate, and what connections share."""
