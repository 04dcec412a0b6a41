"""The tables, the server's clock and the SQL elements that the patterns are built from."""
