"""The tables, the clock and the SQL elements that every pattern is made of."""
