"""Adapters for frameworks and monitoring libraries; each module is imported only by its users."""
