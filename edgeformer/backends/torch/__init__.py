"""torch modules as sessions."""
