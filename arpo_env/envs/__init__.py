"""Environments, one a file."""
