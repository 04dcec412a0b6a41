"""Captures: rows that one session takes and no other session takes meanwhile (SKIP LOCKED)."""
