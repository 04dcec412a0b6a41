"""Benchmarks, compared with other libraries: run by hand (`make bench`), on an idle machine."""
