"""Shipped data, and the scripts that make or convert it."""
