"""The private parts of connections and identifiers of librdmacm."""
