"""Measurements beside the peers: run by hand, on an idle machine."""
