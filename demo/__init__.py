"""Eight processes compete for three keys, watched by a witness that doesn't use the locks."""
