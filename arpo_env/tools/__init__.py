"""Tools, one a file."""
