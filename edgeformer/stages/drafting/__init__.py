"""Writing a first recipe from a file of data."""
