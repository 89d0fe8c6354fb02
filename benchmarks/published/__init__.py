"""What others measured and published, and the public networks behind it."""
